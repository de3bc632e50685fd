/** The service itself: its parts and their health, and who changed what. */
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api, Problem } from "../api/client";
import type { StatusDocument } from "../api/types";
import { Answer, Card, Facts, State, Table, Trouble, When } from "../parts/basics";

export function Admin() {
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  return (
    <>
      <h1>Service</h1>
      <Answer of={status}>{(found) => <Parts of={found} />}</Answer>
      <Audit />
    </>
  );
}

/** Requests that changed something, found and paged by the service. */
function Audit() {
  const [text, setText] = useState("");
  const found = useInfiniteQuery({
    queryKey: ["cluster", "audit", text],
    queryFn: ({ pageParam }) => api.audit(text, pageParam),
    initialPageParam: "",
    getNextPageParam: (page) => page.next ?? undefined,
    placeholderData: (before) => before,
    refetchInterval: false,
  });
  if (found.error instanceof Problem && found.error.status === 403) {
    return <Card title="Who changed what">Admins see the requests that changed something here.</Card>;
  }
  const rows = found.data?.pages.flatMap((page) => page.items) ?? [];
  return (
    <Card title="Who changed what">
      <div className="tools" role="search">
        <input type="search" aria-label="User, path or address has" placeholder="User, path or address" value={text} onChange={(event) => setText(event.target.value)} />
      </div>
      <Trouble error={found.error} />
      <Table
        name="Requests, newest first"
        rows={rows}
        id={(one) => `${one.at} ${one.request_id}`}
        columns={[
          { name: "When", cell: (one) => <When at={one.at} /> },
          { name: "Who", cell: (one) => one.user || "unknown" },
          { name: "From", cell: (one) => one.address },
          { name: "Request", cell: (one) => `${one.method} ${one.path}` },
          { name: "Status", cell: (one) => `${one.status ?? "under way"}${one.dry_run ? ", dry run" : ""}` },
          { name: "Details", cell: (one) => [one.instance, one.command, one.change].filter(Boolean).join(": ") },
        ]}
      />
      {found.hasNextPage && (
        <button type="button" disabled={found.isFetchingNextPage} onClick={() => void found.fetchNextPage()}>
          Older ones
        </button>
      )}
    </Card>
  );
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
