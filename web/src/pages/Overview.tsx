/** The whole installation on one page: is it healthy, what holds the devices, what is not as it should be. */
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api } from "../api/client";
import type { AlertRow, JobStateName, StatusDocument } from "../api/types";
import { counted, number } from "../format";
import { Answer, Bar, Card, State, Table, Trouble, When } from "../parts/basics";
import { Chart } from "../parts/Chart";
import { HeatMap } from "../parts/HeatMap";
import { QueueTree } from "../parts/QueueTree";
import { jobPath, Link, nodePath } from "../router";

const ATTENTION: JobStateName[] = ["FAILED", "RECOVERING", "PREEMPTING", "STOPPING"];
const WAITING: JobStateName[] = ["SUBMITTED", "QUEUED"];

export function Overview() {
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  const heat = useQuery({ queryKey: ["cluster", "heat"], queryFn: api.heat });
  const queues = useQuery({ queryKey: ["cluster", "queues"], queryFn: api.queues });
  const waiting = useQuery({ queryKey: ["jobs", "waiting"], queryFn: () => api.jobs({ state: WAITING, sort: "priority", limit: 8 }) });
  const odd = useQuery({ queryKey: ["jobs", "attention"], queryFn: () => api.jobs({ state: ATTENTION, limit: 8 }) });
  return (
    <>
      <h1>Overview</h1>
      <Answer of={status}>{(found) => <Tiles of={found} />}</Answer>
      <div className="columns wide-first">
        <div>
          <Card title="Nodes and devices">
            <Answer of={heat}>
              {(found) =>
                found.items.length ? (
                  <HeatMap heat={found} />
                ) : (
                  <p>
                    No nodes. The service adds this machine when it starts: <code>rota up</code>
                  </p>
                )
              }
            </Answer>
          </Card>
          <Card title="Queues">
            <Answer of={queues}>{(found) => <QueueTree queues={found.items} gpus={status.data?.cluster.gpus ?? 0} />}</Answer>
          </Card>
          <History />
        </div>
        <div>
          <Card title="Needs attention">
            <Alerts />
            <Answer of={odd}>
              {(found) =>
                found.items.length ? (
                  <ul className="plain">
                    {found.items.map((job) => (
                      <li key={job.id}>
                        <State of={job.state} /> <Link to={jobPath(job.id, "failures")}>{job.id}</Link>{" "}
                        <span className="soft small">
                          of {job.user}, <When at={job.since} ago />
                        </span>
                        <div className="soft small">{job.text}</div>
                      </li>
                    ))}
                  </ul>
                ) : (
                  <p className="soft">Nothing failed, nothing recovers.</p>
                )
              }
            </Answer>
          </Card>
          <Card title="Waiting, and why">
            <Answer of={waiting}>
              {(found) =>
                found.items.length ? (
                  <ul className="plain">
                    {found.items.map((job) => (
                      <li key={job.id}>
                        <Link to={jobPath(job.id, "explain")}>{job.id}</Link>{" "}
                        <span className="soft small">
                          of {job.user}, {counted(job.gpus, "device")}, queued <When at={job.since} ago />
                        </span>
                        <div className="small">{job.text || job.phase}</div>
                      </li>
                    ))}
                  </ul>
                ) : (
                  <p className="soft">No job waits.</p>
                )
              }
            </Answer>
          </Card>
        </div>
      </div>
    </>
  );
}

const SPANS: [string, number][] = [["hour", 3600], ["day", 86400], ["week", 7 * 86400]];

/** Devices held and jobs that waited, over the last while. */
function History() {
  const [span, setSpan] = useState(86400);
  const history = useQuery({ queryKey: ["history", span], queryFn: () => api.history(span, 96) });
  return (
    <Card title="Use over time">
      <div className="tools">
        <label>
          Of the last{" "}
          <select value={span} onChange={(event) => setSpan(Number(event.target.value))}>
            {SPANS.map(([name, s]) => (
              <option key={name} value={s}>
                {name}
              </option>
            ))}
          </select>
        </label>
      </div>
      <Answer of={history}>
        {({ items, gpus, step_s }) => {
          const ago = (i: number) => ((i + 1 - items.length) * step_s) / 3600;
          const curve = (name: string, of: "gpus_used" | "running" | "waiting") => ({ name, points: items.map((one, i): [number, number] => [ago(i), one[of]]) });
          return (
            <Chart
              name={`Devices held, of ${gpus}; jobs that ran and waited`}
              kind="step"
              series={[curve("devices held", "gpus_used"), curve("jobs waiting", "waiting"), curve("jobs running", "running")]}
              x="hours from now"
              y="mean"
              height={200}
              table={
                <Table
                  name="Use over time"
                  rows={items.toReversed()}
                  id={(one) => String(one.at)}
                  columns={[
                    { name: "From", cell: (one) => <When at={one.at} /> },
                    { name: "Devices held", cell: (one) => number(one.gpus_used), numeric: true },
                    { name: "Jobs running", cell: (one) => number(one.running), numeric: true },
                    { name: "Jobs waiting", cell: (one) => number(one.waiting), numeric: true },
                  ]}
                />
              }
            />
          );
        }}
      </Answer>
    </Card>
  );
}

/** Open alerts; the acknowledged ones behind a line. */
function Alerts() {
  const cache = useQueryClient();
  const alerts = useQuery({ queryKey: ["cluster", "alerts"], queryFn: api.alerts });
  const seen = useMutation({
    mutationFn: (id: string) => api.acknowledge(id, ""),
    onSuccess: () => cache.invalidateQueries({ queryKey: ["cluster", "alerts"] }),
  });
  const items = alerts.data?.items ?? [];
  const row = (one: AlertRow) => (
    <li key={one.id}>
      <State of={one.severity} />{" "}
      {one.job ? <Link to={jobPath(one.job, one.code === "SUSPECTED_HANG" ? "now" : "failures")}>{one.text}</Link> : one.node ? <Link to={nodePath(one.node)}>{one.text}</Link> : one.text}{" "}
      <span className="soft small">
        {one.since && <When at={one.since} ago />}
        {one.acknowledged_by && `; seen by ${one.acknowledged_by}${one.note && `: ${one.note}`}`}
      </span>{" "}
      {!one.acknowledged_by && (
        <button type="button" className="link" disabled={seen.isPending} onClick={() => seen.mutate(one.id)}>
          Acknowledge
        </button>
      )}
    </li>
  );
  const known = items.filter((one) => one.acknowledged_by);
  return (
    <>
      <ul className="plain" aria-label="Alerts">
        {items.filter((one) => !one.acknowledged_by).map(row)}
      </ul>
      {known.length > 0 && (
        <details>
          <summary>{counted(known.length, "acknowledged alert")}</summary>
          <ul className="plain">{known.map(row)}</ul>
        </details>
      )}
      <Trouble error={alerts.error ?? seen.error} />
    </>
  );
}

function Tiles({ of: { state, cluster, warnings } }: { of: StatusDocument }) {
  const count = (...states: JobStateName[]) => states.reduce((sum, one) => sum + (cluster.jobs[one] ?? 0), 0);
  const waiting = count("SUBMITTED", "QUEUED");
  const over = count("SUCCEEDED", "FAILED", "CANCELLED");
  const live = Object.values(cluster.jobs).reduce((sum, n) => sum + n, 0) - waiting - over;
  return (
    <>
      <div className="tiles">
        <Tile name="Service" value={<State of={state} />} />
        <Tile name="Nodes" value={cluster.nodes} note={cluster.nodes_bad ? `${cluster.nodes_bad} not in use` : "all in use"} to="/nodes" />
        <Tile name="Devices held" value={`${cluster.gpus_used} / ${cluster.gpus}`}>
          <Bar share={cluster.gpus ? cluster.gpus_used / cluster.gpus : 0} label={`${cluster.gpus_used} of ${cluster.gpus} devices held`} />
        </Tile>
        <Tile name="Running" value={live} to="/jobs?show=live" />
        <Tile name="Waiting" value={waiting} to="/jobs?show=waiting" />
        <Tile name="Failed" value={count("FAILED")} to="/jobs?show=failed" />
      </div>
      {warnings.map((one) => (
        <p key={one} className="warning" role="note">
          <span aria-hidden>!</span> {one}
        </p>
      ))}
    </>
  );
}

interface TileProps {
  name: string;
  value: React.ReactNode;
  note?: string;
  to?: string;
  children?: React.ReactNode;
}

function Tile({ name, value, note, to, children }: TileProps) {
  return (
    <div className="tile">
      <span className="soft">{to ? <Link to={to}>{name}</Link> : name}</span>
      <span className="figure">{value}</span>
      {children}
      {note && <span className="soft small">{note}</span>}
    </div>
  );
}
