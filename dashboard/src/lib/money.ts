import type { Cost, Pool } from "../api/types";

type Sums = Pick<Cost, "spent_usd" | "on_demand_usd">;

/** Provider whose machines cause no bill; a price of theirs is simulated. */
const FREE_PROVIDER = "local";

/** Returns the saved fraction of the on-demand price, or null if there are no prices. */
export function saving(cost: Sums | undefined): number | null {
  return cost && cost.on_demand_usd > 0 ? 1 - cost.spent_usd / cost.on_demand_usd : null;
}

/** Returns true if none of the pools causes a bill; `names` limits them to these pools. */
export function billsNothing(pools: readonly Pool[], names?: readonly string[]): boolean {
  const used = names ? pools.filter((each) => names.includes(each.name)) : pools;
  const known = names ? used.length === new Set(names).size : true;
  return known && used.length > 0 && used.every((each) => each.provider === FREE_PROVIDER);
}
