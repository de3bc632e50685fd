/** Light, dark, or as the system has it; remembered in this browser. */
import { useState } from "react";

export type Theme = "system" | "light" | "dark";
const KEY = "rota-theme";

export function applyTheme(theme: Theme): void {
  document.documentElement.dataset.theme = theme;
  for (const watcher of watchers) watcher();
}

export function storedTheme(): Theme {
  const found = localStorage.getItem(KEY);
  return found === "light" || found === "dark" ? found : "system";
}

export function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, set] = useState(storedTheme);
  return [
    theme,
    (next) => {
      localStorage.setItem(KEY, next);
      set(next);
      applyTheme(next);
    },
  ];
}

const watchers = new Set<() => void>();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => watchers.forEach((one) => one()));

/** Call `watcher` when the colours change; returns how to end that. */
export function watchTheme(watcher: () => void): () => void {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

/** The present value of a CSS variable: what draws on a canvas cannot use the variable itself. */
export function colour(name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
