import type { Caller, Job } from "../api/types";

const SCOPES: readonly Caller["scope"][] = ["read", "submit", "admin"];

/**
 * Returns why a token does not allow what needs a scope, or null if it does. The API decides; as
 * long as the token's scope is not known, nothing is refused here.
 */
export function refusal(caller: Caller | undefined, needed: Caller["scope"]): string | null {
  if (!caller || SCOPES.indexOf(caller.scope) >= SCOPES.indexOf(needed)) return null;
  return `This needs a token with scope ${needed}; ${caller.name} has scope ${caller.scope}.`;
}

/** Returns why a token does not allow changes of a job, or null: only its owner and admins may. */
export function refusalForJob(
  caller: Caller | undefined,
  { owner }: Pick<Job, "owner">,
): string | null {
  const scope = refusal(caller, "submit");
  if (scope || !caller || caller.scope === "admin" || caller.name === owner) return scope;
  return `The job belongs to ${owner ?? "nobody"}; jobs of others need a token with scope admin.`;
}
