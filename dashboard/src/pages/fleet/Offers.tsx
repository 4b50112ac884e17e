import { Button } from "@mantine/core";
import { useState } from "react";
import type { Pool } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { Panel } from "../../components/Panel";
import { clock, count, DASH, percent, usd } from "../../lib/format";
import { billsNothing } from "../../lib/money";

const FIRST = 20;
/** Column that is left out where no pool tells both prices. */
const DISCOUNT = "Below on demand";

type Offer = {
  pool: string;
  zone: string;
  machine_type: string;
  spot: boolean;
  cpus: number;
  gpus: number;
  price_per_hour: number;
  on_demand_price_per_hour: number;
  as_of: number;
};

/** Offers of the pools, cheapest first. */
export function Offers({ pools }: { pools: Pool[] }) {
  const [all, setAll] = useState(false);
  const offers = pools
    .flatMap((pool) => (pool.offers ?? []).map((each) => ({ ...each, pool: pool.name }) as Offer))
    .sort((a, b) => a.price_per_hour - b.price_per_hour);
  const simulated = billsNothing(pools);
  return (
    <Panel
      title="Offers"
      note={`${count(offers.length)}, cheapest first${simulated ? "; prices are simulated" : ""}`}
      empty={
        offers.length
          ? undefined
          : "No prices yet: they appear after the controller has queried the pools."
      }
      flush
    >
      <DataTable
        label="Offers"
        columns={COLUMNS.filter(({ name }) => name !== DISCOUNT || offers.some(discount))}
        rows={all ? offers : offers.slice(0, FIRST)}
        id={(row) => `${row.pool} ${row.zone} ${row.machine_type} ${row.spot}`}
      />
      {!all && offers.length > FIRST && (
        <Button variant="subtle" size="xs" m="sm" onClick={() => setAll(true)}>
          Show all {count(offers.length)}
        </Button>
      )}
    </Panel>
  );
}

const COLUMNS: Column<Offer>[] = [
  { name: "Type", key: (row) => row.machine_type, cell: (row) => row.machine_type || DASH },
  { name: "Pool", key: (row) => row.pool, cell: (row) => row.pool },
  { name: "Zone", wide: true, key: (row) => row.zone, cell: (row) => row.zone || DASH },
  { name: "Kind", wide: true, cell: (row) => (row.spot ? "spot" : "on demand") },
  { name: "CPUs", right: true, wide: true, key: (row) => row.cpus, cell: (row) => count(row.cpus) },
  { name: "GPUs", right: true, wide: true, key: (row) => row.gpus, cell: (row) => count(row.gpus) },
  {
    name: "USD per hour",
    right: true,
    key: (row) => row.price_per_hour,
    cell: (row) => usd(row.price_per_hour),
  },
  {
    name: DISCOUNT,
    right: true,
    wide: true,
    key: discount,
    cell: (row) => percent(discount(row), 0),
  },
  { name: "Price as of", right: true, wide: true, cell: (row) => clock(row.as_of) },
];

function discount(offer: Offer): number | null {
  const full = offer.on_demand_price_per_hour;
  return full > 0 ? 1 - offer.price_per_hour / full : null;
}
