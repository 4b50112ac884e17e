import { Link } from "react-router";
import type { Machine, Worker } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { Panel } from "../../components/Panel";
import { StateBadge } from "../../components/StateBadge";
import { DASH, duration, usd } from "../../lib/format";
import { gpuUse, hasGpu } from "../../lib/gpus";
import { useNow } from "../../lib/useNow";

/** Current machines; `workers` tell what GPUs they have. */
export function Machines({ machines, workers }: { machines: Machine[]; workers: Worker[] }) {
  const now = useNow(machines.length > 0);
  return (
    <Panel
      title="Machines"
      empty={
        machines.length
          ? undefined
          : "None: machines are launched when a job needs them, and released afterwards."
      }
      flush
    >
      <DataTable
        label="Machines"
        columns={columns(now, workers.filter(hasGpu))}
        rows={machines}
        id={(row) => row.id}
      />
    </Panel>
  );
}

function columns(now: number, onGpus: Worker[]): Column<Machine>[] {
  const age = (row: Machine) => (row.launched_at ? now - row.launched_at : null);
  return [
    {
      name: "Machine",
      key: (row) => row.id,
      cell: (row) => <span className="mono">{row.id}</span>,
    },
    {
      name: "State",
      key: (row) => row.state,
      cell: (row) => (
        <span title={row.problem ?? undefined}>
          <StateBadge state={row.problem ? "unreachable" : (row.state ?? DASH)} />
        </span>
      ),
    },
    {
      name: "Pool",
      wide: true,
      key: (row) => row.pool,
      cell: (row) => `${row.pool ?? DASH}${row.pool_removed ? " (removed)" : ""}`,
    },
    { name: "Zone", wide: true, key: (row) => row.zone, cell: (row) => row.zone || DASH },
    { name: "Type", wide: true, cell: (row) => row.machine_type || DASH },
    ...(onGpus.length ? [gpuColumn(onGpus)] : []),
    {
      name: "Job",
      key: (row) => row.job,
      cell: (row) => (row.job ? <Link to={`/jobs/${row.job}`}>{row.job}</Link> : DASH),
    },
    {
      name: "USD per hour",
      right: true,
      wide: true,
      key: (row) => row.price_per_hour,
      cell: (row) => usd(row.price_per_hour),
    },
    { name: "Age", right: true, wide: true, key: age, cell: (row) => duration(age(row)) },
  ];
}

/** Only for fleets with GPUs, because the table is wide. */
function gpuColumn(onGpus: Worker[]): Column<Machine> {
  const gpus = (row: Machine) =>
    onGpus
      .filter((worker) => worker.machine === row.id)
      .map(gpuUse)
      .join("; ");
  return { name: "GPUs", wide: true, key: gpus, cell: (row) => gpus(row) || DASH };
}
