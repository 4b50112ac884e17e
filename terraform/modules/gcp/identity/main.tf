locals {
  secrets = toset(["api-token", "job-secrets", "ray-token", "servers"])
  roles = {
    control = "control plane: API, ledger, controller"
    store   = "tensors servers and parameter servers"
    worker  = "machines of the fleet"
  }
  objects = "projects/_/buckets/${var.bucket}/objects"

  # Read access to each secret; the control plane also generates them.
  readers = merge(
    { for name in local.secrets : "control-${name}" => { role = "control", secret = name } },
    {
      "store-servers"    = { role = "store", secret = "servers" }
      "worker-ray-token" = { role = "worker", secret = "ray-token" }
    },
  )

  # Permissions by role and object name prefix.
  grants = {
    control-packages = { role = "control", grant = "roles/storage.objectUser", below = "packages/" }
    control-jobs     = { role = "control", grant = "roles/storage.objectUser", below = "jobs/" }
    control-shows    = { role = "control", grant = "roles/storage.objectUser", below = "control/" }
    control-release  = { role = "control", grant = "roles/storage.objectViewer", below = "release/" }
    store-jobs       = { role = "store", grant = "roles/storage.objectUser", below = "jobs/" }
    store-release    = { role = "store", grant = "roles/storage.objectViewer", below = "release/" }
    worker-packages  = { role = "worker", grant = "roles/storage.objectViewer", below = "packages/" }
    worker-release   = { role = "worker", grant = "roles/storage.objectViewer", below = "release/" }
    worker-authority = { role = "worker", grant = "roles/storage.objectViewer", below = "control/ca.pem" }
  }

  custom_prefix = replace(var.cluster, "-", "_")
}

resource "google_service_account" "this" {
  for_each = local.roles

  account_id   = "${var.cluster}-${each.key}"
  display_name = "vcasgd ${var.cluster}: ${each.value}"
}

# They have no value here. The control plane generates it at its first start, so that
# no state and no plan contains it.
resource "google_secret_manager_secret" "this" {
  for_each = local.secrets

  secret_id           = "${var.cluster}-${each.key}"
  deletion_protection = false

  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_iam_member" "reader" {
  for_each = local.readers

  secret_id = google_secret_manager_secret.this[each.value.secret].id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.this[each.value.role].member
}

resource "google_secret_manager_secret_iam_member" "generator" {
  for_each = local.secrets

  secret_id = google_secret_manager_secret.this[each.key].id
  role      = "roles/secretmanager.secretVersionAdder"
  member    = google_service_account.this["control"].member
}

resource "google_storage_bucket_iam_member" "objects" {
  for_each = local.grants

  bucket = var.bucket
  role   = each.value.grant
  member = google_service_account.this[each.value.role].member

  condition {
    title      = each.key
    expression = "resource.name.startsWith(\"${local.objects}/${each.value.below}\")"
  }
}

resource "google_storage_bucket_iam_member" "data" {
  for_each = toset(var.data_buckets)

  bucket = each.value
  role   = "roles/storage.objectViewer"
  member = google_service_account.this["worker"].member
}

# Listing is a permission on the bucket, which a condition on objects would deny.
resource "google_project_iam_custom_role" "list" {
  role_id     = "${local.custom_prefix}_list_objects"
  title       = "vcasgd ${var.cluster}: list objects"
  permissions = ["storage.objects.list"]
}

resource "google_storage_bucket_iam_member" "list" {
  for_each = toset(["control", "store"])

  bucket = var.bucket
  role   = google_project_iam_custom_role.list.id
  member = google_service_account.this[each.key].member
}

resource "google_project_iam_custom_role" "launch" {
  role_id = "${local.custom_prefix}_launch"
  title   = "vcasgd ${var.cluster}: launch machines"
  permissions = [
    "compute.disks.create",
    "compute.disks.setLabels",
    "compute.images.useReadOnly",
    "compute.instances.create",
    "compute.instances.get",
    "compute.instances.getGuestAttributes",
    "compute.instances.list",
    "compute.instanceTemplates.get",
    "compute.instanceTemplates.useReadOnly",
    "compute.regions.get",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "compute.zoneOperations.get",
  ]
}

# Setting the metadata of any machine of the project would be running commands on it.
resource "google_project_iam_custom_role" "own" {
  role_id = "${local.custom_prefix}_own"
  title   = "vcasgd ${var.cluster}: set up and end its own machines"
  permissions = [
    "compute.instances.delete",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.instances.setTags",
    "compute.instances.simulateMaintenanceEvent",
  ]
}

resource "google_project_iam_member" "launch" {
  project = var.project
  role    = google_project_iam_custom_role.launch.id
  member  = google_service_account.this["control"].member
}

# The names of the control plane, of the store, and of other clusters' machines start in another way. A launch
# with metadata needs the permission on the project, too.
resource "google_project_iam_member" "own" {
  project = var.project
  role    = google_project_iam_custom_role.own.id
  member  = google_service_account.this["control"].member

  condition {
    title = "machines-of-the-cluster"
    expression = join(" || ", [
      "resource.type != \"compute.googleapis.com/Instance\"",
      "resource.name.extract(\"/instances/{name}\").startsWith(\"vcasgd-${var.cluster}--\")",
    ])
  }
}

resource "google_service_account_iam_member" "lend" {
  service_account_id = google_service_account.this["worker"].name
  role               = "roles/iam.serviceAccountUser"
  member             = google_service_account.this["control"].member
}

resource "google_project_iam_custom_role" "managed_redis" {
  role_id     = "${local.custom_prefix}_managed_redis"
  title       = "vcasgd ${var.cluster}: read the password of managed Redis"
  permissions = ["redis.instances.getAuthString"]
}

resource "google_project_iam_member" "managed_redis" {
  project = var.project
  role    = google_project_iam_custom_role.managed_redis.id
  member  = google_service_account.this["control"].member

  condition {
    title      = "ledger-only"
    expression = "resource.name.endsWith(\"/instances/${var.cluster}-ledger\")"
  }
}
