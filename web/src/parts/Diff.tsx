/** What an edit of a job changed, line by line; added and removed lines carry a sign besides their colour. */
import { asLines, diffLines, hunks } from "./diff";

const SIGN = { same: " ", old: "−", new: "+" };

export function Diff({ before, after, name }: { before: unknown; after: unknown; name: string }) {
  const lines = hunks(diffLines(asLines(before), asLines(after)), 2);
  return (
    <pre className="diff" aria-label={name} tabIndex={0}>
      {lines.map((line, i) =>
        line === null ? (
          <span key={i} className="soft">
            ⋯{"\n"}
          </span>
        ) : (
          <span key={i} className={`diff-${line.kind}`}>
            {SIGN[line.kind]} {line.text}
            {"\n"}
          </span>
        ),
      )}
    </pre>
  );
}
