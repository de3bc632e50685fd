// The digest of everything the UI is built from, so that a test can tell whether the built UI is of these sources.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";

const ROOTS = ["index.html", "package-lock.json", "package.json", "public", "sources.mjs", "src", "tsconfig.json", "vite.config.ts"];

function filesOf(root, path) {
  const entries = readdirSync(join(root, path), { withFileTypes: true });
  return entries.flatMap((one) => (one.isDirectory() ? filesOf(root, `${path}/${one.name}`) : [`${path}/${one.name}`]));
}

/** SHA-256 over name and text of each source file, in order of their names. */
export function digestOfSources(root) {
  const names = ROOTS.flatMap((one) => (one.includes(".") ? [one] : filesOf(root, one))).sort();
  const hash = createHash("sha256");
  for (const name of names) {
    hash.update(`${name}\0`).update(readFileSync(join(root, name))).update("\0");
  }
  return hash.digest("hex");
}
