/** Submit a job: a template or a command becomes a job file; a dry run says what would happen before anything does. */
import { useMutation, useQuery } from "@tanstack/react-query";
import { useRef, useState } from "react";
import { api, Problem } from "../api/client";
import type { Place, PlanReport } from "../api/types";
import { ExplainCard } from "../parts/ExplainCard";
import { Answer, Card, Table, Trouble } from "../parts/basics";
import { go, jobPath, useQueryValues } from "../router";

export interface Command {
  name: string;
  queue: string;
  command: string;
  replicas: number;
  gpus: number;
}

/** The job file of one command. Texts are written as JSON strings, which YAML reads as they are. */
export function jobFileOf({ name, queue, command, replicas, gpus }: Command): string {
  return [
    `name: ${JSON.stringify(name)}`,
    `queue: ${JSON.stringify(queue)}`,
    "roles:",
    "  main:",
    `    run: ${JSON.stringify(command)}`,
    `    replicas: ${replicas}`,
    `    resources: {cpus: 1, gpus: ${gpus}}`,
    "",
  ].join("\n");
}

const FIRST: Command = { name: "hello", queue: "default", command: "echo hello; sleep 30", replicas: 1, gpus: 0 };

/** What only a submitted job has. */
const NOT_SUBMITTED = { waiting: true, blocked_by: [], placement: null, queue: { path: "", used: 0, guaranteed: null, limit: null } };

/** Scrolls an element into view when it appears. */
const inView = (element: HTMLElement | null) => element?.scrollIntoView({ block: "nearest", behavior: "smooth" });

/** With `?from=JOB` the editor begins with the file of that job. */
export function Submit() {
  const [values] = useQueryValues();
  const from = values.get("from") ?? "";
  const spec = useQuery({ queryKey: ["job", from, "spec"], queryFn: () => api.spec(from), enabled: from !== "", staleTime: Infinity });
  if (!from) return <Editing first={jobFileOf(FIRST)} />;
  return (
    <Answer of={spec}>
      {(found) => (
        <>
          <Editing first={found.source} />
          {!found.source && (
            <p className="soft">
              {from} came from a program and has no file; <code>rota clone {from}</code> submits it again.
            </p>
          )}
        </>
      )}
    </Answer>
  );
}

function Editing({ first }: { first: string }) {
  const [source, setSource] = useState(first);
  const [workdir, setWorkdir] = useState("");
  const key = useRef(crypto.randomUUID?.() ?? String(Math.random()));
  const body = () => ({ source, filename: "job.yaml", workdir, sets: [] });
  const plan = useMutation({ mutationFn: () => api.plan(body()) });
  const submit = useMutation({ mutationFn: () => api.submit(body(), key.current), onSuccess: (job) => go(jobPath(job.id)) });
  const edit = (text: string) => {
    setSource(text);
    key.current = crypto.randomUUID?.() ?? String(Math.random());
    plan.reset();
    submit.reset();
  };
  return (
    <>
      <h1>Submit</h1>
      <div className="columns">
        <div>
          <CommandForm write={edit} />
          <Templates write={edit} />
        </div>
        <div>
          <Editor source={source} edit={edit} problem={submit.error ?? plan.error} />
          <div className="tools">
            <label className="grow">
              Folder of its code{" "}
              <input value={workdir} placeholder="a folder on the machine of the service" onChange={(event) => setWorkdir(event.target.value)} />
            </label>
            <button type="button" onClick={() => plan.mutate()} disabled={plan.isPending}>
              Dry run
            </button>
            <button type="button" className="main" onClick={() => submit.mutate()} disabled={submit.isPending}>
              Submit
            </button>
          </div>
          {plan.isPending && <p role="status">Reading the job and trying it on the cluster as it is.</p>}
          {plan.data && (
            <div ref={inView}>
              <Report of={plan.data} />
            </div>
          )}
        </div>
      </div>
    </>
  );
}

function CommandForm({ write }: { write: (source: string) => void }) {
  const [form, setForm] = useState(FIRST);
  const field = (name: keyof Command, title: string, kind: "text" | "number") => (
    <label>
      {title}
      <input
        type={kind}
        min={kind === "number" ? 0 : undefined}
        value={form[name]}
        onChange={(event) => setForm({ ...form, [name]: kind === "number" ? Number(event.target.value) : event.target.value })}
      />
    </label>
  );
  return (
    <Card title="A command">
      <form
        className="form"
        onSubmit={(event) => {
          event.preventDefault();
          write(jobFileOf(form));
        }}
      >
        {field("name", "Name", "text")}
        {field("queue", "Queue", "text")}
        {field("command", "Command", "text")}
        {field("replicas", "Replicas", "number")}
        {field("gpus", "Devices each", "number")}
        <button type="submit">Write the job file</button>
      </form>
    </Card>
  );
}

function Templates({ write }: { write: (source: string) => void }) {
  const templates = useQuery({ queryKey: ["templates"], queryFn: api.templates, staleTime: Infinity });
  return (
    <Card title="Or a template">
      <ul className="plain">
        {templates.data?.items.map((one) => (
          <li key={one.name}>
            <button type="button" onClick={() => write(one.files["job.yaml"] ?? "")}>
              {one.name}
            </button>{" "}
            <span className="soft">{one.text}</span>
          </li>
        ))}
      </ul>
      <p className="soft small">
        A template runs with its code: <code>rota init ddp</code> writes it to a folder of this machine; give that folder below the file.
      </p>
    </Card>
  );
}

/** The text with the places of its mistakes; choosing one goes there. */
function Editor({ source, edit, problem }: { source: string; edit: (text: string) => void; problem: unknown }) {
  const area = useRef<HTMLTextAreaElement>(null);
  const places = problem instanceof Problem ? problem.places : [];
  const show = ({ line, col }: Place) => {
    const before = source.split("\n").slice(0, Math.max(0, line - 1));
    const at = before.join("\n").length + (before.length ? 1 : 0) + Math.max(0, col - 1);
    const end = source.indexOf("\n", at);
    area.current?.focus();
    area.current?.setSelectionRange(at, end < 0 ? source.length : end);
  };
  return (
    <>
      <label htmlFor="job-file">Job file</label>
      <textarea
        id="job-file"
        ref={area}
        className="editor"
        spellCheck={false}
        rows={Math.min(32, Math.max(14, source.split("\n").length + 1))}
        value={source}
        aria-invalid={places.length > 0}
        onChange={(event) => edit(event.target.value)}
      />
      <Trouble error={places.length ? null : problem} />
      {places.length > 0 && (
        <ul className="plain trouble" role="alert">
          {places.map((one, i) => (
            <li key={i}>
              <button type="button" className="link" onClick={() => show(one)}>
                line {one.line}, column {one.col}
              </button>{" "}
              <strong>{one.loc}</strong>: {one.message}
              {one.hint && <span className="soft">; {one.hint}</span>}
            </li>
          ))}
        </ul>
      )}
    </>
  );
}

function Report({ of }: { of: PlanReport }) {
  return (
    <>
      <Card title={of.starts_now ? "✓ It would start now" : "◔ It would wait"} tone={of.starts_now ? "good" : "busy"}>
        {of.why && (
          <p className="lead">
            <code>{of.why.code}</code> {of.why.text}
          </p>
        )}
        <Table
          name="Roles"
          rows={of.roles}
          id={(one) => one.name}
          columns={[
            { name: "Role", cell: (one) => one.name },
            { name: "Replicas", cell: (one) => one.replicas, numeric: true },
            { name: "Runs", cell: (one) => <code>{one.workload ?? one.run?.join(" ")}</code> },
            { name: "Losing one", cell: (one) => one.blast_radius.text },
          ]}
        />
        {of.placement && (
          <Table
            name="Where it would go"
            rows={of.placement.gangs.flatMap((gang) => gang.bundles.map((bundle, i) => ({ gang: gang.gang, i, ...bundle })))}
            id={(one) => `${one.gang} ${one.i}`}
            columns={[
              { name: "Gang", cell: (one) => one.gang },
              { name: "Bundle", cell: (one) => one.i, numeric: true },
              { name: "Node", cell: (one) => one.node },
              { name: "Devices", cell: (one) => one.devices.join(", ") || "none" },
            ]}
          />
        )}
      </Card>
      {!of.starts_now && <ExplainCard of={{ ...of.explanation, ...NOT_SUBMITTED }} />}
    </>
  );
}
