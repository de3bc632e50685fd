/** The queue tree: who may run, who borrows, who waits. */
import { useQuery } from "@tanstack/react-query";
import { api } from "../api/client";
import { Answer } from "../parts/basics";
import { QueueTree } from "../parts/QueueTree";

export function Queues() {
  const queues = useQuery({ queryKey: ["cluster", "queues"], queryFn: api.queues });
  const status = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  return (
    <>
      <h1>Queues</h1>
      <Answer of={queues}>{(found) => <QueueTree queues={found.items} gpus={status.data?.cluster.gpus ?? 0} />}</Answer>
      <p className="soft">
        Edit queues with <code>rota queues apply FILE</code>; <code>--dry-run</code> shows what it would change.
      </p>
    </>
  );
}
