/** Pages by address: the path names the page, the query its filters; back, reload and deep links work. */
import { type AnchorHTMLAttributes, type MouseEvent, useSyncExternalStore } from "react";

const MOVED = "rota-moved";

function subscribe(watcher: () => void): () => void {
  addEventListener("popstate", watcher);
  addEventListener(MOVED, watcher);
  return () => {
    removeEventListener("popstate", watcher);
    removeEventListener(MOVED, watcher);
  };
}

/** The parts of the path, decoded: `/jobs/a%2Fb/logs` gives `["jobs", "a/b", "logs"]`. */
export function usePath(): string[] {
  const path = useSyncExternalStore(subscribe, () => location.pathname);
  return path.split("/").filter(Boolean).map(decodeURIComponent);
}

/** The query of the address, and a function that changes some of its values (an empty one is removed). */
export function useQueryValues(): [URLSearchParams, (values: Record<string, string>) => void] {
  const text = useSyncExternalStore(subscribe, () => location.search);
  const change = (values: Record<string, string>) => {
    const found = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(values)) {
      if (value) found.set(name, value);
      else found.delete(name);
    }
    const query = found.toString();
    go(location.pathname + (query && `?${query}`), true);
  };
  return [new URLSearchParams(text), change];
}

export function go(to: string, replace = false): void {
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  dispatchEvent(new Event(MOVED));
}

type LinkProps = AnchorHTMLAttributes<HTMLAnchorElement> & { to: string };

export function Link({ to, onClick, ...rest }: LinkProps) {
  const follow = (event: MouseEvent<HTMLAnchorElement>) => {
    onClick?.(event);
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(to);
  };
  return <a href={to} onClick={follow} {...rest} />;
}

export const jobPath = (id: string, tab = "") => `/jobs/${encodeURIComponent(id)}${tab && `/${tab}`}`;
export const nodePath = (id: string) => `/nodes/${encodeURIComponent(id)}`;
