/** The whole installation on one page: is it healthy, what holds the devices, what is not as it should be. */
import { useQuery } from "@tanstack/react-query";
import { api } from "../api/client";
import type { JobStateName, StatusDocument } from "../api/types";
import { Answer, Bar, Card, State } from "../parts/basics";
import { HeatMap } from "../parts/HeatMap";
import { QueueTree } from "../parts/QueueTree";
import { jobPath, Link } from "../router";

const ATTENTION: JobStateName[] = ["FAILED", "RECOVERING", "PREEMPTING", "STOPPING"];

export function Overview() {
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  const heat = useQuery({ queryKey: ["cluster", "heat"], queryFn: api.heat });
  const queues = useQuery({ queryKey: ["cluster", "queues"], queryFn: api.queues });
  const odd = useQuery({ queryKey: ["jobs", "attention"], queryFn: () => api.jobs({ state: ATTENTION, limit: 8 }) });
  return (
    <>
      <h1>Overview</h1>
      <Answer of={status}>{(found) => <Tiles of={found} />}</Answer>
      <div className="columns wide-first">
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
        <Card title="Look at these">
          <Answer of={odd}>
            {(found) =>
              found.items.length ? (
                <ul className="plain">
                  {found.items.map((job) => (
                    <li key={job.id}>
                      <State of={job.state} /> <Link to={jobPath(job.id, "failures")}>{job.id}</Link>
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
      </div>
      <Card title="Queues">
        <Answer of={queues}>{(found) => <QueueTree queues={found.items} gpus={status.data?.cluster.gpus ?? 0} />}</Answer>
      </Card>
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
        <Tile name="Jobs with devices" value={live} to="/jobs" />
        <Tile name="Jobs waiting" value={waiting} to="/jobs?state=QUEUED" />
        <Tile name="Failed" value={count("FAILED")} to="/jobs?state=FAILED" />
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
