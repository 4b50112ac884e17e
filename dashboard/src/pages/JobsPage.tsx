import { Button, Checkbox, Code, Pagination, Select, Skeleton, TextInput } from "@mantine/core";
import { IconPlus, IconSearch, IconStack2 } from "@tabler/icons-react";
import { useState } from "react";
import { Link } from "react-router";
import { usePools } from "../api/cluster";
import { isOver, LIST_LIMIT, problemOf, statusOf, useOverview } from "../api/jobs";
import { useCaller } from "../api/signIn";
import type { Brief } from "../api/types";
import { type Column, DataTable } from "../components/DataTable";
import { EmptyState } from "../components/EmptyState";
import { ErrorState } from "../components/ErrorState";
import { GuardedButton } from "../components/GuardedButton";
import { Meter } from "../components/Meter";
import { PageHead } from "../components/PageHead";
import { StateBadge } from "../components/StateBadge";
import { refusal } from "../lib/access";
import { addressOf, MAX_COMPARED } from "../lib/comparison";
import { clock, count, DASH, duration, metric, percent, usd } from "../lib/format";
import { billsNothing, saving } from "../lib/money";
import { useNow } from "../lib/useNow";
import classes from "./JobsPage.module.css";

const PAGE = 25;
/** Column that is left out where no machine has a second price. */
const SAVED = "Saved";
const STATES = [
  "queued",
  "starting",
  "running",
  "paused",
  "finishing",
  "succeeded",
  "failed",
  "cancelled",
];

export function JobsPage() {
  const jobs = useOverview();
  const caller = useCaller();
  const [text, setText] = useState("");
  const [state, setState] = useState<string | null>(null);
  const [page, setPage] = useState(1);
  const [compared, setCompared] = useState<string[]>([]);
  const matching = activeFirst(jobs.data ?? []).filter((job) => matches(job, text, state));
  const pages = Math.max(1, Math.ceil(matching.length / PAGE));
  const current = Math.min(page, pages);
  return (
    <div className="stack">
      <PageHead title="Jobs">
        <GuardedButton
          refusal={refusal(caller, "submit")}
          to="/submit"
          leftSection={<IconPlus size={16} />}
        >
          Submit a job
        </GuardedButton>
      </PageHead>
      {jobs.isError && !jobs.data && <ErrorState error={jobs.error} onRetry={jobs.refetch} />}
      {jobs.isPending && <Skeleton height={240} radius="md" />}
      {jobs.data?.length === 0 && <NoJobs />}
      {jobs.data && jobs.data.length > 0 && (
        <section className={classes.panel} aria-label="All jobs">
          <div className={classes.filters}>
            <TextInput
              aria-label="Search by name"
              placeholder="Search by name"
              leftSection={<IconSearch size={15} />}
              size="xs"
              value={text}
              onChange={(event) => setText(event.currentTarget.value)}
            />
            <Select
              aria-label="State"
              placeholder="Any state"
              size="xs"
              clearable
              data={STATES}
              value={state}
              onChange={setState}
            />
            {compared.length > 1 && (
              <Button component={Link} to={addressOf(compared)} size="xs" variant="light">
                Compare {compared.length} jobs
              </Button>
            )}
            <span className={classes.count}>{countOf(matching.length, jobs.data.length)}</span>
          </div>
          {matching.length === 0 ? (
            <EmptyState title="No matching jobs">Change the search or the state.</EmptyState>
          ) : (
            <JobsTable
              jobs={matching.slice((current - 1) * PAGE, current * PAGE)}
              compared={compared}
              onCompared={setCompared}
            />
          )}
          {pages > 1 && (
            <div className={classes.pages}>
              <Pagination
                size="sm"
                total={pages}
                value={current}
                onChange={setPage}
                getControlProps={(control) => ({ "aria-label": `${control} page` })}
              />
            </div>
          )}
        </section>
      )}
    </div>
  );
}

/** Returns the jobs that have not ended before the others, in the order of each. */
export function activeFirst(jobs: readonly Brief[]): Brief[] {
  return [...jobs.filter((job) => !isOver(job)), ...jobs.filter(isOver)];
}

function countOf(shown: number, all: number): string {
  // the command vcasgd jobs lists older ones, too
  const newest = all < LIST_LIMIT ? "" : "newest ";
  const jobs = all === 1 ? "1 job" : `${newest}${count(all)} jobs`;
  return shown === all ? jobs : `${count(shown)} of ${jobs}`;
}

function matches(job: Brief, text: string, state: string | null): boolean {
  return (state === null || statusOf(job) === state) && job.id.includes(text.trim().toLowerCase());
}

function JobsTable({
  jobs,
  compared,
  onCompared,
}: {
  jobs: Brief[];
  compared: string[];
  onCompared: (jobs: string[]) => void;
}) {
  const now = useNow();
  const simulated = billsNothing(usePools().data ?? []);
  const ticks: Column<Brief> = {
    name: "Compare",
    cell: ({ id }) => {
      const ticked = compared.includes(id);
      return (
        <Checkbox
          size="xs"
          aria-label={`Compare ${id}`}
          checked={ticked}
          disabled={!ticked && compared.length === MAX_COMPARED}
          onChange={() =>
            onCompared(ticked ? compared.filter((each) => each !== id) : [...compared, id])
          }
        />
      );
    },
  };
  const saved = jobs.some((job) => saving(job) !== null);
  const all = [ticks, ...columns(now, simulated).filter(({ name }) => saved || name !== SAVED)];
  return <DataTable label="Jobs" columns={all} rows={jobs} id={(job) => job.id} cards />;
}

/** With `simulated`, no pool causes a bill, and the headings say so. */
function columns(now: number, simulated: boolean): Column<Brief>[] {
  const workersOf = (job: Brief) => (isOver(job) ? null : job.workers);
  const free = (job: Brief) => simulated && job.spent_usd === 0;
  const age = (job: Brief) => Math.max(0, now - job.created_at);
  return [
    {
      name: "Job",
      key: (job) => job.name,
      cell: (job) => (
        <Link to={`/jobs/${job.id}`} className={classes.job} title={job.id}>
          <span className={classes.name}>{job.name}</span>{" "}
          <span className={classes.id}>{job.id.slice(job.name.length + 1)}</span>
        </Link>
      ),
    },
    {
      name: "State",
      key: (job) => STATES.indexOf(statusOf(job)),
      cell: (job) => (
        <>
          <StateBadge state={statusOf(job)} />
          {job.waiting && (
            <span className={classes.waiting} title={job.waiting}>
              {job.waiting.split(/[:;]/, 1)[0]}
            </span>
          )}
          {problemOf(job) && <span className={classes.reason}>{problemOf(job)}</span>}
        </>
      ),
    },
    {
      name: "Owner",
      wide: true,
      key: (job) => job.owner,
      cell: (job) => (
        <span className={classes.owner} title={job.owner ?? undefined}>
          {job.owner ?? DASH}
        </span>
      ),
    },
    {
      name: "Progress",
      key: (job) => job.fraction,
      cell: (job) => (
        <Meter
          fraction={job.fraction}
          text={percent(job.fraction, 0)}
          label={`Progress of ${job.id}`}
          done={job.state === "succeeded"}
        />
      ),
    },
    { name: "Best", right: true, key: (job) => job.best?.value, cell: (job) => <Best job={job} /> },
    {
      name: "Workers",
      right: true,
      wide: true,
      key: workersOf,
      cell: (job) => (isOver(job) ? DASH : `${job.workers} / ${job.max_workers}`),
    },
    {
      name: simulated ? "Cost (simulated)" : "Cost",
      right: true,
      wide: true,
      key: (job) => job.spent_usd,
      cell: (job) => (free(job) ? "free" : usd(job.spent_usd)),
    },
    {
      name: SAVED,
      right: true,
      wide: true,
      key: (job) => saving(job),
      cell: (job) => percent(saving(job), 0),
    },
    {
      name: "Age",
      right: true,
      wide: true,
      key: age,
      cell: (job) => (
        <span title={`submitted ${clock(job.created_at)}`}>{duration(age(job), 1)}</span>
      ),
    },
  ];
}

/** Best value of the metric that ranks a job's models, with its name. */
function Best({ job: { best } }: { job: Brief }) {
  if (!best) return DASH;
  return (
    <span className={classes.best}>
      <span className={classes.metric} title={best.metric}>
        {best.metric}
      </span>
      {metric(best.metric, best.value)}
    </span>
  );
}

function NoJobs() {
  return (
    <section className={classes.panel} aria-label="All jobs">
      <EmptyState icon={<IconStack2 size={30} stroke={1.4} aria-hidden />} title="No jobs yet">
        Submit a job here, or from a shell: <Code>vcasgd submit job.yaml --follow</Code>
      </EmptyState>
    </section>
  );
}
