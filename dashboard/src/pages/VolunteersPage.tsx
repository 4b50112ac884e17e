import { Skeleton } from "@mantine/core";
import type { ReactNode } from "react";
import type { PublicJob } from "../api/types";
import { isPrivate, useVolunteers } from "../api/volunteers";
import { type Column, DataTable } from "../components/DataTable";
import { EmptyState } from "../components/EmptyState";
import { ErrorState } from "../components/ErrorState";
import { Meter } from "../components/Meter";
import { Notice } from "../components/Notice";
import { PageHead } from "../components/PageHead";
import { Panel } from "../components/Panel";
import shell from "../components/Shell.module.css";
import { StateBadge } from "../components/StateBadge";
import { Stat, Stats } from "../components/Stats";
import { ThemeSwitch } from "../components/ThemeSwitch";
import { count, decimal, metric, percent } from "../lib/format";
import mark from "../mark.svg";
import classes from "./VolunteersPage.module.css";

type Contribution = PublicJob["contributions"][number];

/** Public page, without a session: the jobs that everyone may see, and their contributors. */
export default function VolunteersPage() {
  return (
    <>
      <header className={shell.header}>
        <div className={classes.bar}>
          <span className={shell.name}>
            <img src={mark} width={22} height={22} alt="" />
            vcasgd
          </span>
          <div className={shell.tools}>
            <ThemeSwitch />
          </div>
        </div>
      </header>
      <main className={classes.main}>
        <Content />
      </main>
    </>
  );
}

function Content() {
  const { data, error, isPending, refetch } = useVolunteers();
  if (isPending) return <Skeleton height={320} radius="md" aria-label="Loading" />;
  if (isPrivate(error)) return <Private />;
  if (!data) return <ErrorState error={error} onRetry={refetch} />;
  return (
    <div className="stack">
      <PageHead title="Volunteers" />
      <p className={classes.intro}>
        People lend their machines to train these models together. The page updates itself.
      </p>
      {error && (
        <Notice tone="warn" title="No answer">
          The figures are the last known ones.
        </Notice>
      )}
      {data.jobs.map((job, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: the public data has no identifiers
        <PublicPanel key={index} job={job} />
      ))}
      {data.jobs.length === 0 && (
        <EmptyState title="Nothing is trained in public at the moment">
          Jobs appear here as soon as their authors make them public.
        </EmptyState>
      )}
    </div>
  );
}

function Private() {
  return (
    <>
      <PageHead title="Volunteers" />
      <EmptyState title="This cluster has no public page for volunteers">
        Its administrator can set <code>VCASGD_PUBLIC_PAGE=true</code>.
      </EmptyState>
    </>
  );
}

function PublicPanel({ job }: { job: PublicJob }) {
  return (
    <Panel title={job.title} tools={<StateBadge state={job.state} />}>
      <div className="stack">
        {job.description && <p className={classes.description}>{job.description}</p>}
        <Progress job={job} />
        <Figures job={job} />
        <Contributors job={job} />
      </div>
    </Panel>
  );
}

function Progress({ job }: { job: PublicJob }) {
  const done = job.state === "succeeded";
  return (
    <div className={classes.progress}>
      <Meter fraction={job.progress} text={percent(job.progress)} label="Progress" done={done} />
    </div>
  );
}

function Figures({ job }: { job: PublicJob }) {
  const { evaluation } = job;
  const name = evaluation ? evaluation.metric : "evaluation";
  return (
    <Stats>
      <Stat
        label={`Latest ${name}`}
        value={metric(name, evaluation?.value)}
        note={evaluation ? `after epoch ${decimal(evaluation.epoch, 1)}` : "not evaluated yet"}
      />
      <Stat
        label="Samples"
        value={count(job.samples)}
        note={job.total_samples === null ? "trained" : `of ${count(job.total_samples)}`}
      />
      <Stat label="Machines now" value={count(job.machines)} note={machinesNote(job)} />
      <Stat
        label="Volunteers"
        value={percent(shareOfVolunteers(job), 0)}
        note="of all samples so far"
      />
    </Stats>
  );
}

function machinesNote({ machines, state }: PublicJob): string {
  if (machines > 0) return "working on this model";
  return ["succeeded", "failed", "cancelled"].includes(state) ? "training has ended" : "none yet";
}

/** Returns null before the first sample. */
function shareOfVolunteers({ contributions, samples }: PublicJob): number | null {
  if (samples === 0) return null;
  return contributions.reduce((all, each) => all + each.share, 0);
}

const COLUMNS: Column<Contribution>[] = [
  { name: "Volunteer", cell: nameOf, key: (row) => row.nickname?.toLowerCase() },
  { name: "Samples", cell: (row) => count(row.samples), key: (row) => row.samples, right: true },
  {
    name: "Share",
    cell: (row) => (
      <Meter
        fraction={row.share}
        text={percent(row.share)}
        label={`Share of ${row.nickname ?? "anonymous volunteers"}`}
      />
    ),
    key: (row) => row.share,
    right: true,
  },
];

function nameOf({ nickname }: Contribution): ReactNode {
  return nickname ?? <em className="dim">anonymous</em>;
}

function Contributors({ job }: { job: PublicJob }) {
  if (job.contributions.length === 0) {
    return <p className={classes.note}>No volunteer has contributed to it yet.</p>;
  }
  return (
    <>
      <div className={classes.table}>
        <DataTable
          label={`Contributors to ${job.title}`}
          columns={COLUMNS}
          rows={job.contributions}
          id={(row) => row.nickname ?? ""}
        />
      </div>
      {job.own_samples > 0 && (
        <p className={classes.note}>
          The other {count(job.own_samples)} samples were trained on the project's own machines.
        </p>
      )}
    </>
  );
}
