/** What changed between two texts, line by line: the longest common subsequence (Myers 1986 names the edit graph). */

export interface DiffLine {
  kind: "same" | "old" | "new";
  text: string;
}

const CELLS_MAX = 4_000_000;

/** Lines of both texts in order. Texts too long for the table are shown as all old, then all new. */
export function diffLines(before: string, after: string): DiffLine[] {
  const a = before.split("\n");
  const b = after.split("\n");
  const width = b.length + 1;
  if (a.length * width > CELLS_MAX) {
    return [...a.map((text) => ({ kind: "old" as const, text })), ...b.map((text) => ({ kind: "new" as const, text }))];
  }
  // longest[i][j]: how many lines a[i..] and b[j..] have in common
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const here = i * width + j;
      longest[here] = a[i] === b[j] ? longest[here + width + 1]! + 1 : Math.max(longest[here + width]!, longest[here + 1]!);
    }
  }
  const lines: DiffLine[] = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const here = i * width + j;
    if (i < a.length && j < b.length && a[i] === b[j]) {
      lines.push({ kind: "same", text: a[i]! });
      i++;
      j++;
    } else if (i < a.length && (j === b.length || longest[here + width]! >= longest[here + 1]!)) lines.push({ kind: "old", text: a[i++]! });
    else lines.push({ kind: "new", text: b[j++]! });
  }
  return lines;
}

/** The changed lines with `around` lines of context; null marks what was left out. */
export function hunks(lines: DiffLine[], around: number): (DiffLine | null)[] {
  const near = lines.map((_, i) => lines.slice(Math.max(0, i - around), i + around + 1).some((one) => one.kind !== "same"));
  const shown: (DiffLine | null)[] = [];
  lines.forEach((line, i) => {
    if (near[i]) shown.push(line);
    else if (shown.length === 0 || shown.at(-1) !== null) shown.push(null);
  });
  return shown;
}

/** A value as indented lines, `key: value`, in the order it came: for reading and for comparing. */
export function asLines(value: unknown, indent = ""): string {
  if (value === null || typeof value !== "object") return `${indent}${plain(value)}`;
  const entries: [string, unknown][] = Array.isArray(value) ? value.map((one, i) => [nameOf(one, i), one]) : Object.entries(value);
  if (!entries.length) return `${indent}${Array.isArray(value) ? "[]" : "{}"}`;
  return entries
    .map(([key, one]) => {
      const flat = one === null || typeof one !== "object" || (Array.isArray(one) && one.every((x) => x === null || typeof x !== "object"));
      if (flat) return `${indent}${key}: ${Array.isArray(one) ? `[${one.map(plain).join(", ")}]` : plain(one)}`;
      return Object.keys(one as object).length ? `${indent}${key}:\n${asLines(one, `${indent}  `)}` : `${indent}${key}: {}`;
    })
    .join("\n");
}

const plain = (value: unknown) => (typeof value === "string" ? value || '""' : String(value));

function nameOf(value: unknown, i: number): string {
  const name = value !== null && typeof value === "object" && "name" in value ? value.name : undefined;
  return `- ${typeof name === "string" ? name : i}`;
}
