/** The service itself: its parts and their health, and who changed what. */
import { useQuery } from "@tanstack/react-query";
import { api } from "../api/client";
import type { EventRecord, StatusDocument } from "../api/types";
import { Answer, Card, Facts, State, Table, When } from "../parts/basics";
import { jobPath, Link } from "../router";

const LOOKED_AT = 1000;
const SHOWN = 100;

/** Who changed what, newest first, of the last events of the log. */
async function changes(): Promise<EventRecord[]> {
  const { parts } = await api.status();
  const last = Number(parts.store?.records ?? 0);
  const { items } = await api.recent(Math.max(0, last - LOOKED_AT), LOOKED_AT);
  return items.filter((one) => typeof one.by === "string" || one.kind === "JobSubmitted").reverse().slice(0, SHOWN);
}

export function Admin() {
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  const done = useQuery({ queryKey: ["cluster", "changes"], queryFn: changes });
  return (
    <>
      <h1>Service</h1>
      <Answer of={status}>{(found) => <Parts of={found} />}</Answer>
      <Card title="Who changed what">
        <Answer of={done}>
          {(found) => (
            <Table
              name="Changes, newest first"
              rows={found}
              id={(one) => one.number}
              columns={[
                { name: "When", cell: (one) => <When at={one.at} /> },
                { name: "Who", cell: (one) => String(one.by ?? one.user ?? "") },
                { name: "What", cell: (one) => one.kind },
                { name: "Of", cell: (one) => (one.job ? <Link to={jobPath(one.job)}>{one.job}</Link> : String(one.node ?? "")) },
                { name: "Details", cell: (one) => detail(one) },
              ]}
            />
          )}
        </Answer>
      </Card>
    </>
  );
}

function detail(one: EventRecord): string {
  if (one.changes !== undefined) return Object.entries(one.changes as Record<string, unknown>).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(" ");
  return [one.health, one.reason, one.text].filter((part) => typeof part === "string" && part).join(" ");
}

function Parts({ of }: { of: StatusDocument }) {
  return (
    <>
      <Facts
        rows={[
          ["State", <State of={of.state} />],
          ["Version", of.version],
          ["Address", of.url],
          ["Home", of.home],
          ["Process", of.pid],
          ["Started", <When at={of.started_at} />],
          ["Policy", of.profile],
          ["Pretend nodes", of.pretend ?? ""],
          ["Install epoch", of.install_epoch],
        ]}
      />
      <Card title="Parts">
        <Table
          name="Parts of the service"
          rows={Object.entries(of.parts)}
          id={([name]) => name}
          columns={[
            { name: "Part", cell: ([name]) => name },
            { name: "State", cell: ([, part]) => <State of={String(part.state ?? "?")} /> },
            {
              name: "Details",
              cell: ([, part]) =>
                Object.entries(part)
                  .filter(([key, value]) => key !== "state" && value !== null && typeof value !== "object")
                  .map(([key, value]) => `${key}: ${value}`)
                  .join(", "),
            },
          ]}
        />
      </Card>
      {of.warnings.map((one) => (
        <p key={one} className="warning" role="note">
          <span aria-hidden>!</span> {one}
        </p>
      ))}
    </>
  );
}
