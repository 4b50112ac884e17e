import { Anchor } from "@mantine/core";
import { Link } from "react-router";
import { EmptyState } from "../components/EmptyState";
import { PageHead } from "../components/PageHead";

export function NotFoundPage() {
  return (
    <>
      <PageHead title="Nothing here" />
      <EmptyState title="There is no such page">
        <Anchor component={Link} to="/">
          All jobs
        </Anchor>
      </EmptyState>
    </>
  );
}
