import { isOver, useCost, useJobWorkers } from "../../api/jobs";
import type { Job } from "../../api/types";
import { Stat, Stats } from "../../components/Stats";
import { bytes, count, duration, metric, percent, usd } from "../../lib/format";
import { saving } from "../../lib/money";
import { useNow } from "../../lib/useNow";

/** Key figures of a job. */
export function Summary({ job }: { job: Job }) {
  const ended = isOver(job);
  const cost = useCost(job.id).data;
  const workers = useJobWorkers(job.id).data ?? [];
  const now = useNow(!ended);
  const { progress, totals } = job;
  const saved = saving(cost);
  const running = (job.ended_at ?? now) - (job.started_at ?? job.created_at);
  return (
    <Stats>
      <Stat label="Progress" value={percent(progress.fraction)} note={epochOf(progress, ended)} />
      <Best job={job} />
      <Stat
        label="Workers"
        value={ended ? 0 : workers.filter((each) => !each.quarantined).length}
        note={`${job.evictions} evicted, ${job.kills} killed`}
      />
      <Stat label="Priority" value={job.spec.priority} note={`weight ${job.spec.weight}`} />
      <Stat
        label="Updates"
        value={count(totals.updates)}
        note={`mean staleness ${(totals.staleness_mean ?? 0).toFixed(2)}`}
      />
      <Stat
        label="Pushed"
        value={bytes(job.traffic.pushed_bytes)}
        note={`${bytes(job.traffic.fetched_bytes)} fetched`}
      />
      <Stat
        label="Spent"
        value={usd(cost?.spent_usd)}
        note={saved === null ? "no prices available" : `${percent(saved, 0)} below on demand`}
      />
      <Stat label={ended ? "Took" : "Running for"} value={duration(running)} note={lost(job)} />
    </Stats>
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
  const { samples_lost, samples_repeated, samples_applied } = job.progress;
  if (samples_lost === null) return `${count(samples_applied)} samples`;
  return `${count(samples_lost)} samples lost, ${count(samples_repeated)} repeated`;
}
