import { usePools } from "../../api/cluster";
import { isOver, useCost, useJobWorkers, useMetrics } from "../../api/jobs";
import type { Cost, Job } from "../../api/types";
import { Stat, Stats } from "../../components/Stats";
import { type Forecast, forecast } from "../../lib/forecast";
import { bytes, count, duration, metric, percent, usd } from "../../lib/format";
import { billsNothing, saving } from "../../lib/money";
import { useNow } from "../../lib/useNow";
import { Budget } from "./Budget";

/** Key figures of a job, and its budget. */
export function Summary({ job }: { job: Job }) {
  const ended = isOver(job);
  const cost = useCost(job.id).data;
  const metrics = useMetrics(job.id).data ?? [];
  const workers = useJobWorkers(job.id).data ?? [];
  const { progress, totals } = job;
  const running = job.state === "running" || job.state === "finishing";
  const end: Forecast = running
    ? forecast(progress, metrics, cost?.spent_usd)
    : { seconds: null, usd: null };
  return (
    <>
      <Stats>
        <Stat label="Progress" value={percent(progress.fraction)} note={epochOf(progress, ended)} />
        <Best job={job} />
        <Time job={job} left={end.seconds} />
        <Spent cost={cost} atEnd={end.usd} />
        <Stat
          label="Workers"
          value={ended ? 0 : workers.filter((each) => !each.quarantined).length}
          note={`${job.evictions} evicted, ${job.kills} killed`}
        />
        <Stat
          label="Updates"
          value={count(totals.updates)}
          note={`${count(progress.samples_applied)} samples`}
        />
        <Stat
          label="Pushed"
          value={bytes(job.traffic.pushed_bytes)}
          note={`${bytes(job.traffic.fetched_bytes)} fetched`}
        />
        <Stat label="Priority" value={job.spec.priority} note={`weight ${job.spec.weight}`} />
      </Stats>
      <Budget cost={cost} atEnd={end.usd} />
    </>
  );
}

function Time({ job, left }: { job: Job; left: number | null }) {
  const ended = isOver(job);
  const now = useNow(!ended);
  const passed = duration((job.ended_at ?? now) - (job.started_at ?? job.created_at));
  if (ended) return <Stat label="Took" value={passed} note={lost(job)} />;
  if (left === null) {
    const label = job.started_at ? "Since its start" : "Waiting for";
    return <Stat label={label} value={passed} note="time left unknown" />;
  }
  return (
    <Stat label="Time left (estimate)" value={duration(left)} note={`running for ${passed}`} />
  );
}

/** Cost so far. The price of machines that cause no bill is simulated, and says so. */
function Spent({ cost, atEnd }: { cost: Cost | undefined; atEnd: number | null }) {
  const pools = usePools().data ?? [];
  const names = cost?.pools.map((each) => each.pool) ?? [];
  // Before the first machine, any pool may be used.
  const simulated = billsNothing(pools, names.length ? names : undefined);
  if (simulated && cost?.spent_usd === 0) {
    return <Stat label="Spent" value="free" note="local machines" />;
  }
  const saved = saving(cost);
  const notes = [
    atEnd !== null && `≈ ${usd(atEnd)} at the end`,
    saved !== null && `${percent(saved, 0)} below on demand`,
  ].filter(Boolean);
  return (
    <Stat
      label={simulated ? "Spent (simulated)" : "Spent"}
      value={usd(cost?.spent_usd)}
      note={notes.join(", ") || (cost && (simulated ? "no bill" : "no prices available"))}
    />
  );
}

/** Best evaluation, by the metric that ranks epochs. */
function Best({ job }: { job: Job }) {
  const { best, spec } = job;
  const name = best?.metric ?? spec.stop?.metric?.name ?? "accuracy";
  const target = spec.stop?.accuracy ?? spec.stop?.metric?.target;
  const epoch = best ? place(best) : "on validation data";
  return (
    <Stat
      label={`Best ${name}`}
      value={metric(name, best?.value)}
      note={target == null ? epoch : `${epoch}, goal ${metric(name, target)}`}
    />
  );
}

/** Returns the place of an evaluation, which can be between the ends of epochs. */
function place({ epoch, step }: NonNullable<Job["best"]>): string {
  if (Number.isInteger(epoch) || step === null) return `epoch ${Number(epoch.toFixed(2))}`;
  return `epoch ${epoch.toFixed(2)}, step ${count(step)}`;
}

function epochOf({ epochs, finished_epochs }: Job["progress"], ended: boolean): string {
  const epoch = finished_epochs + (ended ? 0 : 1);
  return epochs === null ? `epoch ${epoch}` : `epoch ${Math.min(epoch, epochs)} of ${epochs}`;
}

function lost(job: Job): string {
  const { samples_lost, samples_repeated, samples_applied, samples_skipped } = job.progress;
  const skipped = samples_skipped ? `, ${count(samples_skipped)} bad ones skipped` : "";
  if (samples_lost === null) return `${count(samples_applied)} samples${skipped}`;
  return `${count(samples_lost)} samples lost, ${count(samples_repeated)} repeated${skipped}`;
}
