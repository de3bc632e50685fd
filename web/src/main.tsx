/** Where the UI begins: the cache of documents, the stream of events, the first drawing. */
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { Problem } from "./api/client";
import { followService } from "./api/live";
import { App } from "./app";
import { applyTheme, storedTheme } from "./theme";
import "./styles/main.css";

/** Running times move without events; everything in sight is asked for again this often. */
const REFRESH_MS = 15_000;

const cache = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 1000,
      refetchInterval: REFRESH_MS,
      retry: (times, error) => times < 2 && !(error instanceof Problem && error.status >= 400 && error.status < 500),
    },
  },
});

applyTheme(storedTheme());
followService(cache);
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <QueryClientProvider client={cache}>
      <App />
    </QueryClientProvider>
  </StrictMode>,
);
