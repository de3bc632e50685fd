/** Builds the UI into the Python package; the result is committed (see docs/decisions). */
import react from "@vitejs/plugin-react";
import { writeFileSync } from "node:fs";
import { defineConfig } from "vite";
// @ts-expect-error: plain JavaScript, shared with no types
import { digestOfSources } from "./sources.mjs";

const OUT = "../src/rota/service/ui";

const seal = {
  name: "seal",
  closeBundle() {
    writeFileSync(`${OUT}/sources.sha256`, `${digestOfSources(import.meta.dirname)}\n`);
  },
};

export default defineConfig({
  plugins: [react(), seal],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    license: { fileName: "licenses.md" },
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 700,
    rolldownOptions: {
      output: {
        entryFileNames: "assets/[name]-[hash].js",
        chunkFileNames: "assets/[name]-[hash].js",
        assetFileNames: "assets/[name]-[hash][extname]",
      },
    },
  },
  server: { proxy: { "/api": "http://127.0.0.1:7700", "/login": "http://127.0.0.1:7700" } },
});
