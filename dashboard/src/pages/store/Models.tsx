import { Link } from "react-router";
import type { StoreNode } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { count } from "../../lib/format";

type Row = { job: string; node: string; version: number; queued: number; published: number };

/** Models on the parameter servers, with one row per shard. */
export function Models({ nodes }: { nodes: StoreNode[] }) {
  const rows = nodes.flatMap((node) =>
    Object.entries(node.versions ?? {}).map(([job, version]) => ({
      job,
      node: node.node,
      version,
      queued: node.queued?.[job] ?? 0,
      published: node.publications?.[job] ?? 0,
    })),
  );
  return (
    <DataTable label="Models" columns={COLUMNS} rows={rows} id={(row) => row.job + row.node} />
  );
}

const COLUMNS: Column<Row>[] = [
  {
    name: "Job",
    key: (row) => row.job,
    cell: (row) => <Link to={`/jobs/${row.job}`}>{row.job}</Link>,
  },
  { name: "Node", wide: true, key: (row) => row.node, cell: (row) => row.node },
  { name: "Version", right: true, key: (row) => row.version, cell: (row) => count(row.version) },
  {
    name: "Snapshots published",
    right: true,
    wide: true,
    key: (row) => row.published,
    cell: (row) => count(row.published),
  },
  {
    name: "Updates waiting",
    right: true,
    key: (row) => row.queued,
    cell: (row) => count(row.queued),
  },
];
