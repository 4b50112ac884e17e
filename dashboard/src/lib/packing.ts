import { zipSync } from "fflate";

/** Never part of a package, as on the command line. */
const IGNORED = new Set([
  ".git",
  ".venv",
  "venv",
  "node_modules",
  "__pycache__",
  ".mypy_cache",
  ".pytest_cache",
  ".ruff_cache",
  ".ipynb_checkpoints",
  ".DS_Store",
]);
/** The same for each file, so that equal content gives an equal digest. */
const DATE = new Date(1980, 0, 1, 0, 0, 0);

export type Package = { name: string; files: number; zip: Uint8Array };

type Chosen = { path: string; data: Uint8Array };

/** A zip as it was chosen, or the files of a folder as a zip. */
export async function packageOf(files: File[]): Promise<Package> {
  const [first] = files;
  if (!first) throw new Error("no file was chosen");
  if (files.length === 1 && !first.webkitRelativePath && first.name.endsWith(".zip")) {
    return { name: first.name, files: 1, zip: await content(first) };
  }
  const chosen = await Promise.all(
    files
      .filter((file) => wanted(pathOf(file)))
      .map(async (file) => ({ path: inside(pathOf(file)), data: await content(file) })),
  );
  if (chosen.length === 0) throw new Error("the folder holds no files");
  const folder = first.webkitRelativePath.split("/")[0];
  return { name: folder || `${chosen.length} files`, files: chosen.length, zip: packed(chosen) };
}

export function wanted(path: string): boolean {
  return !path.endsWith(".pyc") && !path.split("/").some((part) => IGNORED.has(part));
}

function packed(files: Chosen[]): Uint8Array {
  const entries = files
    .sort((a, b) => (a.path < b.path ? -1 : 1))
    .map(({ path, data }) => [path, [data, { mtime: DATE }]] as const);
  return zipSync(Object.fromEntries(entries) as Parameters<typeof zipSync>[0]);
}

function pathOf(file: File): string {
  return file.webkitRelativePath || file.name;
}

/** Without the name of the folder itself. */
function inside(path: string): string {
  return path.includes("/") ? path.slice(path.indexOf("/") + 1) : path;
}

async function content(file: File): Promise<Uint8Array> {
  return new Uint8Array(await file.arrayBuffer());
}
