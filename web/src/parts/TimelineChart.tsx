/** The timeline as a picture, with every bar also as a line of a list. */
import { seconds } from "../format";
import { type Timeline, ticksOf } from "./timeline";

const LEFT = 130;
const WIDTH = 1100;
const ROW = 26;
const TOP = 22;
const NARROWEST = 3;

const KINDS: [string, string][] = [
  ["wait", "waits"], ["start", "starts"], ["run", "runs"], ["detect", "failure seen"], ["recover", "recovers"], ["lost", "lost"],
];

/** Places of ticks, of which none is nearer to the one before than a few pixels. */
export function thinned(places: number[]): number[] {
  const kept: number[] = [];
  for (const at of places) if (at - (kept.at(-1) ?? -Infinity) >= NARROWEST) kept.push(at);
  return kept;
}

export function TimelineChart({ of }: { of: Timeline }) {
  const length = of.to - of.from;
  const x = (at: number) => LEFT + ((at - of.from) / length) * (WIDTH - LEFT - 12);
  const height = TOP + of.rows.length * ROW + 12;
  return (
    <figure className="timeline">
      <p className="legend soft">
        {KINDS.map(([kind, words]) => (
          <span key={kind}>
            <span className={`key tl-${kind}`} aria-hidden /> {words}
          </span>
        ))}
        {of.commits.length > 0 && (
          <span>
            <span className="key tl-commit" aria-hidden /> {of.commits.length} commits
          </span>
        )}
      </p>
      <svg viewBox={`0 0 ${WIDTH} ${height}`} role="img" aria-label={`Timeline of ${of.rows.length} rows over ${seconds(length / 1000)}`}>
        {ticksOf(length).map((tick) => (
          <g key={tick}>
            <line x1={x(of.from + tick)} x2={x(of.from + tick)} y1={TOP - 4} y2={height} className="grid" />
            <text x={x(of.from + tick)} y={12} textAnchor="middle" className="soft">
              {tick === 0 ? "0" : `+${seconds(tick / 1000)}`}
            </text>
          </g>
        ))}
        {thinned(of.commits.map((one) => x(one.at))).map((at) => (
          <line key={at} x1={at} x2={at} y1={TOP - 6} y2={TOP + 2} className="tl-commit" />
        ))}
        {of.rows.map((row, i) => (
          <g key={row.name} transform={`translate(0 ${TOP + i * ROW})`}>
            <text x={LEFT - 8} y={ROW / 2 + 4} textAnchor="end">
              {row.name.length > 18 ? `${row.name.slice(0, 17)}…` : row.name}
            </text>
            {row.bars.map((bar, n) => {
              const wide = x(bar.to) - x(bar.from);
              const left = wide < NARROWEST ? Math.max(LEFT, x(bar.from) - (NARROWEST - wide) / 2) : x(bar.from);
              return (
                <rect key={n} x={left} width={Math.max(wide, NARROWEST)} y={4} height={ROW - 8} rx={2} className={`tl-${bar.kind}`}>
                  <title>{`${row.name}: ${bar.words}, ${seconds((bar.to - bar.from) / 1000)}`}</title>
                </rect>
              );
            })}
          </g>
        ))}
      </svg>
      <details>
        <summary>as a list</summary>
        <ul>
          {of.rows.flatMap((row) =>
            row.bars.map((bar, n) => (
              <li key={`${row.name} ${n}`}>
                {row.name}: {bar.words}, at +{seconds((bar.from - of.from) / 1000)} for {seconds((bar.to - bar.from) / 1000)}
              </li>
            )),
          )}
        </ul>
      </details>
    </figure>
  );
}
