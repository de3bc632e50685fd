/** What would happen to the jobs of now under other scheduling policies: played in virtual time on a copy. */
import { useMutation, useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api } from "../api/client";
import type { Outlook, OutlookJob } from "../api/types";
import { number, seconds } from "../format";
import { Answer, Card, Table, Trouble } from "../parts/basics";
import { Chart } from "../parts/Chart";
import type { Series } from "../parts/curves";
import { jobPath, Link } from "../router";

/** How many of the jobs have started after a number of seconds, one curve a policy. */
export function startedOver(outlook: Outlook): Series[] {
  return outlook.profiles.map((name) => {
    const starts = outlook.items.map((one) => one.starts_s[name] ?? null).filter((at): at is number => at !== null);
    starts.sort((a, b) => a - b);
    return { name, points: starts.map((at, i): [number, number] => [at, i + 1]) };
  });
}

/** `+` is later than under the baseline; null where one of the two never starts. */
export function shift(job: OutlookJob, base: string, other: string): number | null {
  const [a, b] = [job.starts_s[base] ?? null, job.starts_s[other] ?? null];
  return a === null || b === null ? null : b - a;
}

export function Compare() {
  const profiles = useQuery({ queryKey: ["profiles"], queryFn: api.profiles, staleTime: Infinity });
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  return (
    <>
      <h1>Compare policies</h1>
      <p>The jobs that wait and run now are played to their end under two policies, on a copy and in virtual time. Nothing here changes the cluster.</p>
      <Answer of={profiles}>
        {(found) => <Choose names={found.items.map((one) => one.name)} texts={new Map(found.items.map((one) => [one.name, one.text]))} present={status.data?.profile ?? "default"} />}
      </Answer>
    </>
  );
}

function Choose({ names, texts, present }: { names: string[]; texts: Map<string, string>; present: string }) {
  const [base, setBase] = useState(present);
  const [other, setOther] = useState(names.find((one) => one !== present) ?? present);
  const play = useMutation({ mutationFn: () => api.outlook([base, other]) });
  const pick = (title: string, value: string, set: (name: string) => void) => (
    <label title={texts.get(value)}>
      {title}{" "}
      <select value={value} onChange={(event) => set(event.target.value)}>
        {names.map((one) => (
          <option key={one}>{one}</option>
        ))}
      </select>
    </label>
  );
  return (
    <>
      <div className="tools">
        {pick("Policy", base, setBase)}
        {pick("beside", other, setOther)}
        <button type="button" className="main" disabled={play.isPending || base === other} onClick={() => play.mutate()}>
          Play both
        </button>
        {base === other && <span className="soft">choose two different ones</span>}
      </div>
      <p className="soft">
        {base}: {texts.get(base)} {other}: {texts.get(other)}
      </p>
      <Trouble error={play.error} />
      {play.isPending && <p role="status">Playing.</p>}
      {play.data && <Result of={play.data} />}
    </>
  );
}

type Figures = Outlook["summary"][string];

const FIGURES: [string, (of: Figures) => string][] = [
  ["Jobs that start", (of) => `${of.started} of ${of.jobs}`],
  ["Wait, mean", (of) => seconds(of.wait_s.mean)],
  ["Wait, 95 of 100", (of) => seconds(of.wait_s.p95)],
  ["Wait, longest", (of) => seconds(of.wait_s.max)],
  ["To the end, mean", (of) => seconds(of.jct_s.mean)],
  ["All done after", (of) => seconds(of.makespan_s)],
  ["Devices in use", (of) => (of.utilisation === null ? "–" : `${Math.round(of.utilisation * 100)} %`)],
  ["Preemptions", (of) => String(of.preemptions)],
];

function Result({ of }: { of: Outlook }) {
  const [base, other] = of.profiles as [string, string];
  if (!of.items.length) return <p className="card">No job waits or runs now: there is nothing to play.</p>;
  return (
    <>
      <Card title={`${base} beside ${other}`}>
        <Table
          name="Figures of both policies"
          rows={FIGURES}
          id={([name]) => name}
          columns={[
            { name: "Figure", cell: ([name]) => name },
            ...of.profiles.map((profile) => ({ name: profile, cell: ([, read]: (typeof FIGURES)[number]) => read(of.summary[profile]!), numeric: true })),
          ]}
        />
        <p className="soft">{of.basis}</p>
      </Card>
      <Card title="Jobs">
        <Chart name="Jobs started" kind="step" series={startedOver(of)} x="seconds from now" y="jobs started" />
        <Table
          name="Start of each job under both policies"
          rows={of.items}
          id={(one) => one.job}
          columns={[
            { name: "Job", cell: (one) => <Link to={jobPath(one.job)}>{one.job}</Link> },
            { name: "Queue", cell: (one) => one.queue },
            { name: "Devices", cell: (one) => number(one.gpus), numeric: true },
            ...of.profiles.map((profile) => ({ name: profile, cell: (one: OutlookJob) => start(one, profile), numeric: true })),
            { name: "Difference", cell: (one) => difference(shift(one, base, other)), numeric: true },
          ]}
        />
      </Card>
    </>
  );
}

function start(job: OutlookJob, profile: string): string {
  const at = job.starts_s[profile] ?? null;
  if (at === null) return "not foreseen";
  return at <= 0 ? (job.state === "QUEUED" ? "now" : "runs") : `in ${seconds(at)}`;
}

function difference(value: number | null): string {
  if (value === null) return "–";
  if (Math.abs(value) < 0.5) return "same";
  return value > 0 ? `${seconds(value)} later` : `${seconds(-value)} sooner`;
}
