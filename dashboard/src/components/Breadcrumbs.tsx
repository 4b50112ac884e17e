import { Link, useLocation, useSearchParams } from "react-router";
import { crumbsOf } from "../lib/places";
import classes from "./Breadcrumbs.module.css";

/** Path to the current page, from the cluster. */
export function Breadcrumbs({ cluster }: { cluster: string }) {
  const { pathname } = useLocation();
  const [search] = useSearchParams();
  const crumbs = [{ name: cluster, to: "/" }, ...crumbsOf(pathname, search.get("tab"))];
  return (
    <nav aria-label="Breadcrumbs">
      <ol className={classes.list}>
        {crumbs.map(({ name, to }) => (
          <li key={`${name} ${to}`}>
            {to ? <Link to={to}>{name}</Link> : <span aria-current="page">{name}</span>}
          </li>
        ))}
      </ol>
    </nav>
  );
}
