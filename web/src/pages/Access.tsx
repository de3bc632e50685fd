/** Who may do what: users and their roles, tokens, names of secrets, webhooks. */
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api } from "../api/client";
import type { GrantedRole, TokenDocument } from "../api/types";
import { Answer, Card, Facts, Table, Trouble, When } from "../parts/basics";

const ROLES = ["viewer", "user", "queue-admin", "admin"];
const DAY_S = 86400;
const LASTS: [string, number | null][] = [["a day", DAY_S], ["30 days", 30 * DAY_S], ["a year", 365 * DAY_S], ["no end", null]];

export const grantWords = (grants: GrantedRole[]) => grants.map((one) => `${one.role} of ${one.queue || "all queues"}`).join(", ");

export function Access() {
  const me = useQuery({ queryKey: ["whoami"], queryFn: api.whoami, staleTime: Infinity });
  return (
    <>
      <h1>Access</h1>
      <Answer of={me}>
        {(found) => {
          const admin = found.grants.some((one) => one.role === "admin");
          return (
            <>
              <Facts rows={[["You are", found.name], ["You may", grantWords(found.grants)]]} />
              {admin && <Users />}
              <Tokens me={found.name} admin={admin} />
              <Secrets />
              {admin && <Webhooks />}
            </>
          );
        }}
      </Answer>
    </>
  );
}

/** A mutation after which the lists of this page are asked for again. */
function useChange<In, Out>(run: (given: In) => Promise<Out>) {
  const cache = useQueryClient();
  return useMutation({ mutationFn: run, onSuccess: () => cache.invalidateQueries({ queryKey: ["access"] }) });
}

function QueueChoice({ value, set }: { value: string; set: (queue: string) => void }) {
  const queues = useQuery({ queryKey: ["cluster", "queues"], queryFn: api.queues });
  return (
    <label>
      on{" "}
      <select value={value} onChange={(event) => set(event.target.value)} aria-label="Queue of the role">
        <option value="">all queues</option>
        {queues.data?.items.map((one) => (
          <option key={one.path}>{one.path}</option>
        ))}
      </select>
    </label>
  );
}

function RoleChoice({ value, set }: { value: string; set: (role: string) => void }) {
  return (
    <label>
      Role{" "}
      <select value={value} onChange={(event) => set(event.target.value)}>
        {ROLES.map((one) => (
          <option key={one}>{one}</option>
        ))}
      </select>
    </label>
  );
}

function Users() {
  const users = useQuery({ queryKey: ["access", "users"], queryFn: api.users });
  const [name, setName] = useState("");
  const [role, setRole] = useState("user");
  const [queue, setQueue] = useState("");
  const put = useChange(() => {
    const before = users.data?.items.find((one) => one.name === name)?.grants ?? [];
    return api.putUser(name, [...before.filter((one) => one.queue !== queue), { role, queue }]);
  });
  const remove = useChange(api.removeUser);
  return (
    <Card title="Users">
      <Answer of={users}>
        {(found) => (
          <Table
            name="Users and their roles"
            rows={found.items}
            id={(one) => one.name}
            columns={[
              { name: "User", cell: (one) => one.name },
              { name: "May", cell: (one) => grantWords(one.grants) },
              {
                name: "Remove",
                cell: (one) =>
                  one.name !== "local" && (
                    <button
                      type="button"
                      className="link"
                      disabled={remove.isPending}
                      onClick={() => confirm(`Remove ${one.name}? Its tokens and secrets end at once; its jobs stay.`) && remove.mutate(one.name)}
                    >
                      Remove {one.name}
                    </button>
                  ),
              },
            ]}
          />
        )}
      </Answer>
      <form
        className="tools"
        aria-label="Give a role"
        onSubmit={(event) => {
          event.preventDefault();
          put.mutate(undefined);
        }}
      >
        <label>
          User <input value={name} onChange={(event) => setName(event.target.value)} required autoComplete="off" />
        </label>
        <RoleChoice value={role} set={setRole} />
        <QueueChoice value={queue} set={setQueue} />
        <button type="submit" disabled={put.isPending || !name}>
          Give this role
        </button>
      </form>
      <Trouble error={put.error ?? remove.error} />
    </Card>
  );
}

function Tokens({ me, admin }: { me: string; admin: boolean }) {
  const tokens = useQuery({ queryKey: ["access", "tokens"], queryFn: api.tokens });
  const [user, setUser] = useState(me);
  const [name, setName] = useState("");
  const [lasts, setLasts] = useState(1);
  const make = useChange(() => api.makeToken({ user, name, role: "admin", queue: "", ttl_s: LASTS[lasts]![1] }));
  const revoke = useChange(api.revokeToken);
  return (
    <Card title="Tokens">
      <Answer of={tokens}>
        {(found) => (
          <Table
            name="Valid tokens"
            rows={found.items}
            id={(one) => one.id}
            columns={[
              { name: "Token", cell: (one) => <code>{one.id}</code> },
              { name: "User", cell: (one) => one.user },
              { name: "Name", cell: (one) => one.name },
              { name: "At most", cell: (one) => `${one.role} of ${one.queue || "all queues"}` },
              { name: "Made", cell: (one) => <When at={one.made_at} /> },
              { name: "Expires", cell: (one) => (one.expires_at ? <When at={one.expires_at} /> : "never") },
              {
                name: "Revoke",
                cell: (one) => (
                  <button
                    type="button"
                    className="link"
                    disabled={revoke.isPending}
                    onClick={() => confirm(`Revoke ${one.name || one.id}? Its sessions end at once.`) && revoke.mutate(one.id)}
                  >
                    Revoke {one.name || one.id}
                  </button>
                ),
              },
            ]}
          />
        )}
      </Answer>
      <form
        className="tools"
        aria-label="Make a token"
        onSubmit={(event) => {
          event.preventDefault();
          make.mutate(undefined);
        }}
      >
        {admin && (
          <label>
            For user <input value={user} onChange={(event) => setUser(event.target.value)} required autoComplete="off" />
          </label>
        )}
        <label>
          Name <input value={name} onChange={(event) => setName(event.target.value)} placeholder="what it is for" autoComplete="off" />
        </label>
        <label>
          Lasts{" "}
          <select value={lasts} onChange={(event) => setLasts(Number(event.target.value))}>
            {LASTS.map(([title], i) => (
              <option key={title} value={i}>
                {title}
              </option>
            ))}
          </select>
        </label>
        <button type="submit" disabled={make.isPending}>
          Make a token
        </button>
      </form>
      {make.data?.token && tokens.data?.items.some((one) => one.id === make.data.id) && <Made of={make.data} />}
      <Trouble error={make.error ?? revoke.error} />
    </Card>
  );
}

function Made({ of }: { of: TokenDocument }) {
  return (
    <div role="status">
      <p>
        Token of {of.user}. It is shown once; keep it now, or use it from another machine: <code>rota login {of.url}</code> asks for it.
      </p>
      <pre tabIndex={0} aria-label="New token">
        {of.token}
      </pre>
    </div>
  );
}

function Secrets() {
  const secrets = useQuery({ queryKey: ["access", "secrets"], queryFn: api.secrets, retry: false });
  return (
    <Card title="Your secrets">
      <Answer of={secrets}>
        {(found) =>
          found.items.length ? (
            <p>
              {found.items.map((one) => (
                <code key={one.name}>{one.name}</code>
              ))}
            </p>
          ) : (
            <p className="soft">None. A job names a secret and gets its value; no page shows it.</p>
          )
        }
      </Answer>
      <p className="soft">
        <code>rota secret set NAME</code> keeps a value; it asks for the value or reads it from stdin.
      </p>
    </Card>
  );
}

function Webhooks() {
  const hooks = useQuery({ queryKey: ["access", "webhooks"], queryFn: api.webhooks });
  return (
    <Card title="Webhooks">
      <Answer of={hooks}>
        {(found) =>
          found.items.length ? (
            <Table
              name="Webhooks"
              rows={found.items}
              id={(one) => one.id}
              columns={[
                { name: "To", cell: (one) => one.url },
                { name: "On", cell: (one) => one.on.join(", ") || "every notice" },
                { name: "Queue", cell: (one) => one.queue || "all" },
              ]}
            />
          ) : (
            <p className="soft">No webhooks.</p>
          )
        }
      </Answer>
      <p className="soft">
        Add one with <code>rota webhook add URL</code>
      </p>
    </Card>
  );
}
