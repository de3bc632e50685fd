/** The frame around the pages: where one can go, whether the service answers, keys. */
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useRef, useState } from "react";
import { api, Problem, signIn, signOut } from "./api/client";
import { useConnection } from "./api/live";
import { Access, grantWords } from "./pages/Access";
import { Admin } from "./pages/Admin";
import { Compare } from "./pages/Compare";
import { Job } from "./pages/Job";
import { Jobs } from "./pages/Jobs";
import { Node, Nodes } from "./pages/Nodes";
import { Overview } from "./pages/Overview";
import { Queues } from "./pages/Queues";
import { Submit } from "./pages/Submit";
import { clock } from "./format";
import { Trouble } from "./parts/basics";
import { go, Link, usePath } from "./router";
import { type Theme, useTheme } from "./theme";

const PAGES: [string, string, string][] = [
  ["/", "Overview", "o"], ["/queues", "Queues", "q"], ["/jobs", "Jobs", "j"], ["/nodes", "Nodes", "n"], ["/submit", "Submit", "s"],
  ["/compare", "Compare", "c"], ["/access", "Access", "u"], ["/admin", "Service", "a"],
];

export function App() {
  const path = usePath();
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  const place = path.join("/");
  useEffect(() => {
    document.title = path.length ? `${path.slice(0, 2).join(" ")} – Rota` : "Rota";
    if (!first.current) main.current?.focus({ preventScroll: true });
    first.current = false;
  }, [place]);
  useKeys();
  const asked = useQuery({ queryKey: ["cluster", "status"], queryFn: api.status });
  const stranger = asked.error instanceof Problem && asked.error.status === 401;
  return (
    <>
      <a className="skip" href="#main">
        To the content
      </a>
      <header>
        <Link className="brand" to="/">
          Rota
        </Link>
        <nav aria-label="Pages">
          {!stranger && PAGES.map(([to, title, key]) => (
            <Link key={to} to={to} title={`press g, then ${key}`} aria-current={`/${path[0] ?? ""}` === to ? "page" : undefined}>
              {title}
            </Link>
          ))}
        </nav>
        {asked.data && <Account />}
        <ThemeChoice />
      </header>
      <ConnectionBanner />
      <main id="main" ref={main} tabIndex={-1}>
        {stranger ? <SignIn /> : <Page path={path} />}
      </main>
      <Keys />
    </>
  );
}

/** Who is signed in, what that user may do, and the way out. */
function Account() {
  const cache = useQueryClient();
  const me = useQuery({ queryKey: ["whoami"], queryFn: api.whoami, staleTime: Infinity });
  const leave = useMutation({ mutationFn: signOut, onSuccess: () => cache.resetQueries() });
  if (!me.data) return null;
  return (
    <span className="account">
      <Link to="/access" title={grantWords(me.data.grants)}>
        {me.data.name}
      </Link>
      <button type="button" className="link" onClick={() => leave.mutate()} disabled={leave.isPending}>
        Sign out
      </button>
    </span>
  );
}

function Page({ path: [page, id, tab] }: { path: string[] }) {
  switch (page) {
    case undefined:
    case "login":
      return <Overview />;
    case "queues":
      return <Queues />;
    case "jobs":
      return id ? <Job key={id} id={id} tab={tab ?? ""} /> : <Jobs />;
    case "nodes":
      return id ? <Node key={id} id={id} /> : <Nodes />;
    case "submit":
      return <Submit />;
    case "compare":
      return <Compare />;
    case "access":
      return <Access />;
    case "admin":
      return <Admin />;
    default:
      return (
        <p className="card">
          There is no page “{page}”. <Link to="/">Overview</Link>
        </p>
      );
  }
}

function SignIn() {
  const [code, setCode] = useState("");
  const [token, setToken] = useState("");
  const asked = new URLSearchParams(location.search);
  const atLogin = location.pathname === "/login";
  const stale = atLogin && asked.has("code");
  const next = asked.get("next") ?? "/";
  const target = atLogin ? (/^\/(?![/\\])/.test(next) ? next : "/") : location.pathname + location.search;
  const open = useMutation({ mutationFn: () => signIn(token ? { token } : { code }), onSuccess: () => location.assign(target) });
  return (
    <>
      <h1>Sign in</h1>
      <form
        className="card"
        onSubmit={(event) => {
          event.preventDefault();
          open.mutate();
        }}
      >
        <p>
          <code>rota ui</code> opens this page for you, or prints an address with a code; a code works once. A token (<code>rota token</code>) works, too.
        </p>
        <p className="tools">
          <label>
            Code <input value={code} onChange={(event) => setCode(event.target.value)} autoComplete="off" />
          </label>
          <label>
            Token <input type="password" value={token} onChange={(event) => setToken(event.target.value)} autoComplete="off" />
          </label>
          <button type="submit" disabled={open.isPending || !(code || token)}>
            Sign in
          </button>
        </p>
        {stale && !open.error && <p role="alert">The code in the address was used or is too old.</p>}
        <Trouble error={open.error} />
      </form>
    </>
  );
}

function ConnectionBanner() {
  const { live, lostAt } = useConnection();
  return (
    <p className="banner" role="status" hidden={live}>
      {!live && `The service does not answer; reconnecting. Last updated ${lostAt ? clock(lostAt) : "before"}.`}
    </p>
  );
}

function ThemeChoice() {
  const [theme, choose] = useTheme();
  return (
    <label className="theme">
      <span className="unseen">Colours</span>
      <select value={theme} onChange={(event) => choose(event.target.value as Theme)}>
        <option value="system">System theme</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </label>
  );
}

const KEYS: [string, string][] = [
  ["/", "find on this page"], ["j, k", "next and previous job of the list"], ["Enter", "open it"],
  ["arrows", "walk over the heat map"], ["?", "these keys"], ["Esc", "close them"],
];
const KEYS_ID = "keys";

function Keys() {
  return (
    <dialog id={KEYS_ID} aria-label="Keys" onClick={(event) => event.target === event.currentTarget && event.currentTarget.close()}>
      <h2>Keys</h2>
      <table>
        <tbody>
          {[...KEYS, ...PAGES.map(([, title, key]): [string, string] => [`g ${key}`, title])].map(([key, what]) => (
            <tr key={key}>
              <th scope="row">
                <kbd>{key}</kbd>
              </th>
              <td>{what}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <form method="dialog">
        <button type="submit">Close</button>
      </form>
    </dialog>
  );
}

/** `/` goes to the search field, `j` and `k` walk over the rows, `g` and a letter open a page, `?` lists them. */
function useKeys(): void {
  useEffect(() => {
    let leader = false;
    const press = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, textarea, select")) return;
      const page = leader ? PAGES.find(([, , key]) => key === event.key) : undefined;
      leader = event.key === "g";
      if (page) go(page[0]);
      else if (event.key === "/") document.querySelector<HTMLElement>("main input[type=search]")?.focus();
      else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
      else if (event.key === "?") (document.getElementById(KEYS_ID) as HTMLDialogElement | null)?.showModal();
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function step(by: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("main .row-link")];
  const here = rows.indexOf(document.activeElement as HTMLElement);
  rows[Math.min(rows.length - 1, Math.max(0, here + by))]?.focus();
}
