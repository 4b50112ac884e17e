import type { Cost } from "../api/types";

type Sums = Pick<Cost, "spent_usd" | "on_demand_usd">;

/** Returns the saved fraction of the on-demand price, or null if there are no prices. */
export function saving(cost: Sums | undefined): number | null {
  return cost && cost.on_demand_usd > 0 ? 1 - cost.spent_usd / cost.on_demand_usd : null;
}
