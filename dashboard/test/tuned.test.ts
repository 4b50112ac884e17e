import { describe, expect, it } from "vitest";
import { tunedOf } from "../src/pages/job/Tuned";
import { aJob } from "./factories";

describe("tunedOf", () => {
  it("returns nothing without tuning", () => {
    expect(tunedOf(aJob())).toEqual([]);
  });

  it("returns each enabled setting, with the default until a value is tuned", () => {
    const spec = {
      ...aJob().spec,
      tuning: { local_steps: true, momentum: true, mixing: true, learners_per_machine: 4 },
    };
    expect(tunedOf(aJob({ spec })).map(([, value]) => value)).toEqual([
      "100%",
      "0.00",
      "100%",
      "1",
    ]);
    const tuned = {
      ...aJob().tuned,
      shares: { a: 1, b: 0.25 },
      implicit_momentum: 0.75,
      mixing: 0.5,
      learners: { m: 3 },
    };
    expect(tunedOf(aJob({ spec, tuned })).map(([, value]) => value)).toEqual([
      "25%",
      "0.75",
      "50%",
      "3",
    ]);
  });

  it("returns the factor of the learning rate after a rollback", () => {
    const tuned = { ...aJob().tuned, rollbacks: 2, learning_rate: 0.25 };
    expect(tunedOf(aJob({ tuned })).map(([, value]) => value)).toEqual(["× 0.25"]);
  });
});
