import { unzipSync } from "fflate";
import { expect, test } from "vitest";
import { lineOf } from "../src/lib/lines";
import { packageOf, wanted } from "../src/lib/packing";

function file(path: string, text: string): File {
  const made = new File([text], path.split("/").at(-1) ?? path);
  Object.defineProperty(made, "webkitRelativePath", { value: path });
  // jsdom's files can't be read this way
  made.arrayBuffer = async () => new TextEncoder().encode(text).buffer;
  return made;
}

test("a folder is packed without its own name and without what is not code", async () => {
  const folder = [file("job/train.py", "x"), file("job/.git/HEAD", "y"), file("job/lib/a.py", "z")];

  const { name, files, zip } = await packageOf(folder);

  expect([name, files]).toEqual(["job", 2]);
  expect(Object.keys(unzipSync(zip))).toEqual(["lib/a.py", "train.py"]);
  const again = await packageOf([...folder].reverse());
  expect(again.zip).toEqual(zip);
});

test.each([
  ["train.py", true],
  ["a/__pycache__/train.pyc", false],
  ["node_modules/x/index.js", false],
  ["venvs/notes.txt", true],
])("%s is packed: %s", (path, answer) => {
  expect(wanted(path)).toBe(answer);
});

test.each([
  ["epochs", 1],
  ["update.alpha", 4],
  ["update.missing", 2],
  ["", 0],
])("the field %s is on line %d", (path, line) => {
  expect(lineOf("name: x\nepochs: 3\nupdate:\n  rule: vc-asgd\n  alpha: 2\n", path)).toBe(line);
});
