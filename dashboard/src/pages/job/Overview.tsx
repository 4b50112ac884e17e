import type { Job } from "../../api/types";
import { Curves } from "./Curves";
import { Machines } from "./Machines";
import { Rates } from "./Rates";
import { Rejected } from "./Rejected";
import { Staleness } from "./Staleness";
import { Subtasks } from "./Subtasks";
import { Tuned } from "./Tuned";

export function Overview({ job }: { job: Job }) {
  return (
    <div className="stack">
      <Curves job={job} />
      <Machines job={job} />
      <div className="two">
        <Subtasks job={job} />
        <Rates job={job} />
        <Staleness job={job} />
        <Rejected job={job} />
        <Tuned job={job} />
      </div>
    </div>
  );
}
