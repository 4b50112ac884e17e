import type { Cost } from "../../api/types";
import { percent, usd } from "../../lib/format";
import classes from "./Budget.module.css";

/** Bar of the spent and the projected part of the budget; nothing for a job without a budget. */
export function Budget({ cost, atEnd }: { cost: Cost | undefined; atEnd: number | null }) {
  if (!cost?.max_cost_usd) return null;
  const { spent_usd: spent, max_cost_usd: budget } = cost;
  const over = atEnd !== null && atEnd > budget;
  return (
    <section className={classes.budget} aria-label="Budget">
      <span>
        <b>{usd(spent)}</b> of the budget of <b>{usd(budget)}</b>
      </span>
      <span
        className={classes.track}
        role="progressbar"
        aria-label="Spent part of the budget"
        aria-valuenow={Math.round(partOf(spent, budget))}
        aria-valuemin={0}
        aria-valuemax={100}
      >
        <span
          className={classes.projected}
          data-over={over}
          style={{ width: `${partOf(atEnd ?? spent, budget)}%` }}
        />
        <span className={classes.spent} style={{ width: `${partOf(spent, budget)}%` }} />
      </span>
      <span className={over ? classes.warning : classes.note}>{outlook(spent, budget, atEnd)}</span>
    </section>
  );
}

function partOf(amount: number, budget: number): number {
  return Math.min(100, (100 * amount) / budget);
}

function outlook(spent: number, budget: number, atEnd: number | null): string {
  if (atEnd === null) return `${percent(spent / budget, 0)} spent`;
  if (atEnd <= budget) return `≈ ${usd(atEnd)} at the end`;
  return `≈ ${usd(atEnd)} at the end: the job pauses before it exceeds the budget`;
}
