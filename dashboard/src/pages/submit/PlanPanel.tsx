import { Button, NumberInput } from "@mantine/core";
import type { UseMutationResult } from "@tanstack/react-query";
import { type ReactNode, useState } from "react";
import { explained } from "../../api/client";
import type { Planned } from "../../api/submitting";
import type { Plan } from "../../api/types";
import { DataTable } from "../../components/DataTable";
import { GuardedButton } from "../../components/GuardedButton";
import { Notice } from "../../components/Notice";
import { Panel } from "../../components/Panel";
import { DASH, duration, usd } from "../../lib/format";
import classes from "./PlanPanel.module.css";

/** Plan of a job: machines and cost, before anything is bought. */
export function PlanPanel({
  plan,
  refusal,
  onPlan,
  action,
}: {
  plan: UseMutationResult<Plan, Error, Planned>;
  /** Why there can be no plan yet, if so. */
  refusal: string | null;
  onPlan: (known: Omit<Planned, "spec">) => void;
  action: ReactNode;
}) {
  return (
    <Panel title="Plan" note="showing the plan buys nothing">
      <div className="stack">
        {plan.data ? <Priced plan={plan.data} /> : null}
        {plan.data?.hours === null && <Unknown onPlan={onPlan} loading={plan.isPending} />}
        {plan.isError && (
          <Notice tone="warn" title="No plan available">
            {explained(plan.error)}
          </Notice>
        )}
        {!plan.data && (
          <GuardedButton
            refusal={refusal}
            variant="default"
            fullWidth
            loading={plan.isPending}
            onClick={() => onPlan({})}
          >
            {plan.isError ? "Try again" : "Show the plan"}
          </GuardedButton>
        )}
        {action}
      </div>
    </Panel>
  );
}

/** Form for what nothing has measured yet, and duration and cost depend on. */
function Unknown({
  onPlan,
  loading,
}: {
  onPlan: (known: Omit<Planned, "spec">) => void;
  loading: boolean;
}) {
  const [samples, setSamples] = useState<number | string>("");
  const [speed, setSpeed] = useState<number | string>("");
  const known = {
    ...(typeof samples === "number" && { samples }),
    ...(typeof speed === "number" && { samples_per_second: speed }),
  };
  return (
    <div className={classes.unknown}>
      <NumberInput
        size="xs"
        label="Samples in an epoch"
        min={1}
        hideControls
        thousandSeparator
        value={samples}
        onChange={setSamples}
      />
      <NumberInput
        size="xs"
        label="Samples per second of a machine"
        min={0}
        hideControls
        value={speed}
        onChange={setSpeed}
      />
      <Button
        size="xs"
        variant="default"
        disabled={Object.keys(known).length === 0}
        loading={loading}
        onClick={() => onPlan(known)}
      >
        Estimate again
      </Button>
    </div>
  );
}

function Priced({ plan }: { plan: Plan }) {
  const bought = plan.offers.filter((each) => each.machines > 0);
  return (
    <>
      <dl className={classes.figures}>
        <Cost plan={plan} />
        <Figure
          name="Per hour"
          value={isFree(plan) ? "free" : usd(plan.usd_per_hour)}
          note={`${plan.machines} machine${plan.machines === 1 ? "" : "s"}`}
        />
        <Figure
          name="Duration"
          value={plan.hours === null ? DASH : duration(3600 * plan.hours)}
          note={plan.hours === null ? "the speed is unknown" : "estimate"}
        />
      </dl>
      {bought.length > 0 && (
        <DataTable
          label="Planned machines"
          rows={bought}
          id={(row) => `${row.pool} ${row.zone} ${row.machine_type} ${row.spot}`}
          columns={[
            {
              name: "Machines",
              cell: (row) => `${row.machines} × ${row.machine_type || row.pool}`,
            },
            { name: "Location", cell: (row) => row.zone || row.pool },
            { name: "USD per hour, each", right: true, cell: (row) => usd(row.price_per_hour) },
          ]}
        />
      )}
      <ul className={classes.remarks}>
        {[...deadline(plan), ...excludedPools(plan), ...plan.remedies, ...plan.assumptions].map(
          (each) => (
            <li key={each}>{each}</li>
          ),
        )}
      </ul>
    </>
  );
}

/** Returns true if the machines cause no bill and have no simulated price either. */
function isFree(plan: Plan): boolean {
  return !plan.costs_money && plan.usd_per_hour === 0;
}

function Cost({ plan }: { plan: Plan }) {
  if (isFree(plan)) return <Figure name="Cost" value="free" note="local machines" />;
  return (
    <Figure
      name={plan.costs_money ? "Cost" : "Cost (simulated)"}
      value={usd(plan.cost_usd)}
      note={
        plan.costs_money ? `${usd(plan.on_demand_cost_usd)} on demand` : "local machines are free"
      }
    />
  );
}

function deadline(plan: Plan): string[] {
  return plan.deadline ? [`deadline: ${plan.deadline.text}`] : [];
}

function excludedPools(plan: Plan): string[] {
  return plan.pools
    .filter((each) => !each.usable)
    .map((each) => `pool ${each.pool} excluded: ${each.reasons.join("; ")}`);
}

function Figure({ name, value, note }: { name: string; value: string; note: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd className={classes.value}>{value}</dd>
      <dd>{note}</dd>
    </div>
  );
}
