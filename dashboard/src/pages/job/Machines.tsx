import { isOver, type useTimelines } from "../../api/jobs";
import { useCaller } from "../../api/signIn";
import type { Job, MachineTimeline } from "../../api/types";
import { ErrorState } from "../../components/ErrorState";
import { LOADING, Panel } from "../../components/Panel";
import { refusal } from "../../lib/access";
import type { Domain } from "../../lib/axis";
import { clock } from "../../lib/format";
import { bulks, losses } from "../../lib/timeline";
import { Timeline } from "./Timeline";

/**
 * Machines of the job over time; `times` is the shown range of the axis in Unix seconds, and
 * `start` its 0.
 */
export function Machines({
  job,
  query,
  times,
  start,
  now,
}: {
  job: Job;
  query: ReturnType<typeof useTimelines>;
  times: Domain;
  start: number;
  now: number;
}) {
  const caller = useCaller();
  const mayEvict = !isOver(job) && refusal(caller, "admin") === null;
  const machines = query.data ?? [];
  const failed = query.isError && !query.data;
  return (
    <Panel
      title="Machines"
      note={noteOf(machines, now)}
      empty={machines.length || failed ? undefined : query.isPending ? LOADING : noMachines(job)}
    >
      {failed ? (
        <ErrorState error={query.error} onRetry={query.refetch} />
      ) : (
        <Timeline machines={machines} now={now} times={times} start={start} mayEvict={mayEvict} />
      )}
    </Panel>
  );
}

function noMachines(job: Job): string {
  return isOver(job)
    ? "The job ended before a machine started."
    : "Machines start as soon as a pool has capacity.";
}

function noteOf(machines: MachineTimeline[], now: number): string {
  const lost = losses(machines);
  const evicted = lost.filter((each) => each.state === "evicted").length;
  const parts = [
    `${machines.length} so far`,
    evicted && `${evicted} evicted`,
    lost.length > evicted && `${lost.length - evicted} killed`,
  ];
  const bulkLosses = bulks(machines, now).map(
    (each) => `${each.lost.length} of them at once at ${clock(each.at)}`,
  );
  return [...parts, ...bulkLosses.slice(-1)].filter(Boolean).join(", ");
}
