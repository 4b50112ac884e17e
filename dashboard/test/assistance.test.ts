import { CompletionContext } from "@codemirror/autocomplete";
import { yaml } from "@codemirror/lang-yaml";
import { EditorState } from "@codemirror/state";
import { expect, test } from "vitest";
import type { Schema } from "../src/lib/schema";
import { proposed } from "../src/pages/submit/assistance";

const SCHEMA: Schema = {
  required: ["name"],
  properties: {
    name: { type: "string" },
    update: { properties: { codec: { enum: ["float32", "bfloat16"] } } },
  },
};

function at(text: string, explicit = false) {
  const state = EditorState.create({ doc: text, extensions: [yaml()] });
  return proposed(SCHEMA, new CompletionContext(state, text.length, explicit));
}

test("a field is proposed with its colon, in place of what was typed of it", () => {
  const found = at("name: x\nupdate:\n  co");
  expect(found?.from).toBe("name: x\nupdate:\n  ".length);
  expect(found?.options).toMatchObject([{ label: "codec", apply: "codec: " }]);
});

test("a value is proposed as soon as its field is there", () => {
  expect(at("update:\n  codec: ")?.options.map((each) => each.label)).toEqual([
    "float32",
    "bfloat16",
  ]);
  expect(at("name: ")).toBeNull();
});

test("on an empty line nothing is proposed unless it is asked for", () => {
  expect(at("name: x\n")).toBeNull();
  expect(at("name: x\n", true)?.options.map((each) => each.label)).toEqual(["name", "update"]);
});
