/** A chart by ECharts, loaded only when one is shown; a table has the same figures. */
import type { EChartsCoreOption, EChartsType } from "echarts/core";
import { type ReactNode, useEffect, useRef } from "react";
import { colour, watchTheme } from "../theme";
import type { Mark, Series } from "./curves";

interface Props {
  name: string;
  kind: "line" | "bar" | "step";
  series: Series[];
  marks?: Mark[];
  x: string;
  y: string;
  height?: number;
  /** The figures as a table, for those who do not see the picture; absent where one is beside the picture anyway. */
  table?: ReactNode;
}

const INKS = ["text", "soft", "line", "busy", "warn", "good", "bad"] as const;
type Ink = Record<(typeof INKS)[number], string>;

export function optionOf({ kind, series, marks = [], x, y }: Pick<Props, "kind" | "series" | "marks" | "x" | "y">, ink: Ink): EChartsCoreOption {
  const axis = { nameTextStyle: { color: ink.soft }, axisLabel: { color: ink.soft }, splitLine: { lineStyle: { color: ink.line } } };
  return {
    animation: false,
    color: [ink.busy, ink.warn, ink.good, ink.bad],
    grid: { left: 60, right: 24, top: series.length > 1 ? 36 : 16, bottom: 44 },
    legend: { show: series.length > 1, top: 0, textStyle: { color: ink.text } },
    // drawn on the canvas: the page allows no inline style in HTML
    tooltip: { trigger: "axis", renderMode: "richText", confine: true },
    xAxis: { type: "value", name: x, nameLocation: "middle", nameGap: 28, scale: true, ...axis },
    yAxis: { type: "value", name: y, nameLocation: "middle", nameGap: 44, scale: kind !== "bar", ...axis },
    series: series.map((one, i) => ({
      name: one.name,
      markLine:
        i === 0 && marks.length
          ? {
              symbol: "none",
              animation: false,
              lineStyle: { color: ink.bad, type: "dashed" },
              label: { formatter: "{b}", color: ink.bad, position: "insideEndTop" },
              data: marks.map((mark) => ({ xAxis: mark.x, name: mark.words })),
            }
          : undefined,
      type: kind === "bar" ? "bar" : "line",
      step: kind === "step" ? "end" : undefined,
      data: one.points,
      showSymbol: one.points.length < 40,
      lineStyle: { width: 2 },
    })),
  };
}

export function Chart(props: Props) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<EChartsType | null>(null);
  const latest = useRef(props);
  latest.current = props;

  const draw = () => {
    const ink = Object.fromEntries(INKS.map((name) => [name, colour(`--${name}`)])) as Ink;
    chart.current?.setOption(optionOf(latest.current, ink), { notMerge: true });
  };
  useEffect(() => {
    let gone = false;
    const resize = new ResizeObserver(() => chart.current?.resize());
    void import("./echarts").then(({ init }) => {
      if (gone || !place.current) return;
      chart.current = init(place.current);
      resize.observe(place.current);
      draw();
    });
    const unwatch = watchTheme(draw);
    return () => {
      gone = true;
      unwatch();
      resize.disconnect();
      chart.current?.dispose();
      chart.current = null;
    };
  }, []);
  useEffect(draw, [props.series, props.marks]);

  return (
    <figure className="chart">
      <figcaption>{props.name}</figcaption>
      <div ref={place} role="img" aria-label={`${props.name}: ${props.y} over ${props.x}`} style={{ height: props.height ?? 220 }} />
      {props.table && (
        <details>
          <summary>as a table</summary>
          {props.table}
        </details>
      )}
    </figure>
  );
}
