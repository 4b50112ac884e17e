import { Badge } from "@mantine/core";
import type { Pool, Spend } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { Panel } from "../../components/Panel";
import { count, DASH, duration, usd } from "../../lib/format";
import { useNow } from "../../lib/useNow";
import classes from "./Fleet.module.css";

/** Pools with their machines, prices and back-off. */
export function Pools({ pools, spend }: { pools: Pool[]; spend: Spend | undefined }) {
  const now = useNow(pools.some((each) => each.blocked_until));
  return (
    <Panel
      title="Pools"
      empty={pools.length ? undefined : "None yet: pools appear when the controller is running."}
      flush
    >
      <DataTable label="Pools" columns={columns(now, spend)} rows={pools} id={(row) => row.name} />
    </Panel>
  );
}

function columns(now: number, spend: Spend | undefined): Column<Pool>[] {
  const perHour = new Map(spend?.pools.map((each) => [each.pool, each.usd_per_hour]));
  return [
    {
      name: "Pool",
      key: (row) => row.name,
      cell: (row) => (
        <>
          <b className={classes.strong}>{row.name}</b>
          {row.provider !== row.name && <span className={classes.beside}>{row.provider}</span>}
        </>
      ),
    },
    { name: "Hardware", wide: true, cell: (row) => row.kinds || DASH },
    { name: "Kind", wide: true, cell: (row) => (row.spot ? "spot" : "on demand") },
    {
      name: "Machines",
      right: true,
      key: (row) => row.machines,
      cell: (row) =>
        `${count(row.machines ?? 0)}${row.capacity ? ` / ${count(row.capacity)}` : ""}`,
    },
    {
      name: "Launch requests",
      right: true,
      wide: true,
      key: (row) => row.launches,
      cell: (row) => count(row.launches),
    },
    {
      name: "Cheapest per hour",
      right: true,
      wide: true,
      key: cheapest,
      cell: (row) => usd(cheapest(row)),
    },
    {
      name: "Spend per hour",
      right: true,
      wide: true,
      key: (row) => perHour.get(row.name),
      cell: (row) => usd(perHour.get(row.name)),
    },
    { name: "Trust", wide: true, cell: (row) => row.trust },
    {
      name: "Labels",
      wide: true,
      cell: (row) =>
        row.labels?.length
          ? row.labels.map((label) => (
              <Badge key={label} variant="default" size="sm" tt="none" mr={4}>
                {label}
              </Badge>
            ))
          : DASH,
    },
    { name: "State", wraps: true, cell: (row) => <Availability pool={row} now={now} /> },
  ];
}

function cheapest(pool: Pool): number | null {
  const prices = (pool.offers ?? []).map((each) => Number(each.price_per_hour));
  return prices.length ? Math.min(...prices) : null;
}

function Availability({ pool, now }: { pool: Pool; now: number }) {
  const left = (pool.blocked_until ?? 0) - now;
  if (left <= 0) return pool.reason || <span className={classes.ready}>available</span>;
  return (
    <span className={classes.resting} title={pool.reason ?? undefined}>
      refused; next try in {duration(left)}
      {pool.reason && <span className={classes.reason}>{pool.reason}</span>}
    </span>
  );
}
