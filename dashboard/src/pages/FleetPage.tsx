import { Skeleton } from "@mantine/core";
import { useMachines, usePools, useSpend, useStatus, useWorkers } from "../api/cluster";
import type { Machine, Pool, Spend } from "../api/types";
import { ErrorState } from "../components/ErrorState";
import { PageHead } from "../components/PageHead";
import { Stat, Stats } from "../components/Stats";
import { count, usd } from "../lib/format";
import { billsNothing } from "../lib/money";
import { Machines } from "./fleet/Machines";
import { Offers } from "./fleet/Offers";
import { Pools } from "./fleet/Pools";

/** Pools, machines, and their costs. */
export function FleetPage() {
  const pools = usePools();
  const machines = useMachines();
  const workers = useWorkers();
  const spend = useSpend();
  const status = useStatus();
  return (
    <div className="stack">
      <PageHead title="Fleet" />
      <Figures
        machines={machines.data}
        pools={pools.data}
        spend={spend.data}
        controller={status.data?.controller}
      />
      {pools.isError && !pools.data && <ErrorState error={pools.error} onRetry={pools.refetch} />}
      {pools.isPending ? (
        <Skeleton height={140} radius="md" />
      ) : (
        <Pools pools={pools.data ?? []} spend={spend.data} />
      )}
      {machines.isError && !machines.data ? (
        <ErrorState error={machines.error} onRetry={machines.refetch} />
      ) : (
        machines.data && <Machines machines={machines.data} workers={workers.data ?? []} />
      )}
      {pools.data && <Offers pools={pools.data} />}
    </div>
  );
}

function Figures({
  machines,
  pools,
  spend,
  controller,
}: {
  machines: Machine[] | undefined;
  pools: Pool[] | undefined;
  spend: Spend | undefined;
  controller: boolean | undefined;
}) {
  const joined = machines?.filter((each) => each.joined).length;
  const now = Date.now() / 1000;
  const backingOff = pools?.filter((each) => (each.blocked_until ?? 0) > now).length ?? 0;
  const simulated = billsNothing(pools ?? []);
  const kind = simulated ? " (simulated)" : "";
  const onDemand = spend?.on_demand_usd_per_hour;
  return (
    <Stats>
      <Stat label="Machines" value={count(machines?.length)} note={`${count(joined)} running`} />
      <Stat
        label={`Spend per hour${kind}`}
        value={usd(spend?.usd_per_hour)}
        note={
          simulated
            ? "local machines are free"
            : onDemand
              ? `${usd(onDemand)} on demand`
              : "no on-demand prices available"
        }
      />
      <Stat label={`Total spend${kind}`} value={usd(spend?.spent_usd)} note="by all jobs" />
      <Stat
        label="Pools"
        value={count(pools?.length)}
        note={backingOff ? `${backingOff} backing off` : "all available"}
        tone={backingOff ? "warn" : undefined}
      />
      <Stat
        label="Controller"
        value={controller === undefined ? "–" : controller ? "Running" : "Unavailable"}
        note={controller === false ? "no machines are launched" : "launches and replaces machines"}
        tone={controller === false ? "bad" : undefined}
      />
    </Stats>
  );
}
