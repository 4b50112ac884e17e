import type { StoreView } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { Meter } from "../../components/Meter";
import { Panel } from "../../components/Panel";
import { bytes, count, DASH, decimal, duration } from "../../lib/format";
import { useNow } from "../../lib/useNow";
import classes from "./Store.module.css";

type Row = StoreView["ledger"] & {
  name: string;
  at?: number | null;
  publications_per_second?: number | null;
};

/** Memory, load and replication of each server. */
export function Servers({ store }: { store: StoreView }) {
  const now = useNow();
  const rows: Row[] = [
    ...store.nodes.map((node) => ({ ...node, name: `tensors ${node.node}` })),
    { ...store.ledger, name: "ledger" },
  ];
  return (
    <Panel title="Servers" flush>
      <DataTable label="Servers" columns={columns(now)} rows={rows} id={(row) => row.name} />
    </Panel>
  );
}

function columns(now: number): Column<Row>[] {
  return [
    { name: "Server", cell: (row) => <b className={classes.strong}>{row.name}</b> },
    { name: "Memory", cell: (row) => <MemoryMeter row={row} /> },
    {
      name: "Operations/s",
      right: true,
      wide: true,
      cell: (row) => count(row.operations_per_second),
    },
    {
      name: "Snapshots/s",
      right: true,
      wide: true,
      cell: (row) => decimal(row.publications_per_second, 1),
    },
    { name: "Replicas", right: true, wide: true, cell: (row) => <Replicas row={row} now={now} /> },
    {
      name: "Heartbeat",
      right: true,
      wide: true,
      cell: (row) => (row.at ? `${duration(now - row.at)} ago` : DASH),
    },
  ];
}

function MemoryMeter({ row }: { row: Row }) {
  const { memory_used_bytes: used, memory_limit_bytes: limit } = row;
  if (!used || !limit) return `${bytes(used)}, no limit`;
  return (
    <Meter
      fraction={used / limit}
      text={`${bytes(used)} of ${bytes(limit)}`}
      label={`Memory of ${row.name}`}
    />
  );
}

function Replicas({ row, now }: { row: Row; now: number }) {
  if (row.unreplicated_since) {
    return (
      <span className={classes.bad}>unreplicated for {duration(now - row.unreplicated_since)}</span>
    );
  }
  return count(row.replicas);
}
