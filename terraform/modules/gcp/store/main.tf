locals {
  managed   = var.redis == "managed"
  backed_up = !local.managed && var.backup.days > 0
  owned     = { "vcasgd-stack" = var.cluster }
}

# Separate from the machine that uses it, so that it survives the machine. Next to a managed ledger, it has the authority
# of the API's certificate.
resource "google_compute_disk" "ledger" {
  name   = "${var.cluster}-ledger"
  zone   = var.place.zone
  type   = "pd-ssd"
  size   = var.disk_gb
  labels = local.owned

  snapshot = var.backup.restore

  lifecycle {
    # Only a new disk is made from a snapshot; a change of the variable must not replace a live one.
    ignore_changes = [snapshot]
  }
}

# A snapshot is as consistent as the disk after a power failure, which the append-only file survives.
resource "google_compute_resource_policy" "ledger" {
  count = local.backed_up ? 1 : 0

  name = "${var.cluster}-ledger"

  snapshot_schedule_policy {
    schedule {
      daily_schedule {
        days_in_cycle = 1
        start_time    = "03:00"
      }
    }

    retention_policy {
      max_retention_days    = var.backup.days
      on_source_disk_delete = "KEEP_AUTO_SNAPSHOTS"
    }
  }
}

resource "google_compute_disk_resource_policy_attachment" "ledger" {
  count = local.backed_up ? 1 : 0

  name = google_compute_resource_policy.ledger[0].name
  disk = google_compute_disk.ledger.name
  zone = var.place.zone
}

resource "google_redis_instance" "ledger" {
  count = local.managed ? 1 : 0

  name                    = "${var.cluster}-ledger"
  display_name            = "the ledger of ${var.cluster}"
  tier                    = "STANDARD_HA"
  memory_size_gb          = var.managed_memory_gb
  redis_version           = "REDIS_7_2"
  authorized_network      = var.place.network_id
  auth_enabled            = true
  transit_encryption_mode = "SERVER_AUTHENTICATION"
  redis_configs           = { "maxmemory-policy" = "noeviction" }
  deletion_protection     = false
  labels                  = local.owned

  persistence_config {
    persistence_mode    = "RDB"
    rdb_snapshot_period = "ONE_HOUR"
  }
}

resource "terraform_data" "user_data" {
  for_each = var.nodes.machines

  input = sha256(each.value.user_data)
}

resource "google_compute_instance" "node" {
  for_each = var.nodes.machines

  name         = "${var.cluster}-${each.key}"
  zone         = var.place.zone
  machine_type = var.nodes.machine_type
  labels       = local.owned

  boot_disk {
    initialize_params {
      image = var.nodes.image
      size  = 30
      type  = "pd-balanced"
    }
  }

  network_interface {
    subnetwork = var.place.subnetwork_id
    network_ip = each.value.address

    dynamic "access_config" {
      for_each = var.private ? [] : [true]
      content {}
    }
  }

  service_account {
    email  = var.place.account
    scopes = ["cloud-platform"]
  }

  # For a new machine type.
  allow_stopping_for_update = true

  shielded_instance_config {
    enable_secure_boot = true
  }

  metadata = {
    user-data               = each.value.user_data
    enable-guest-attributes = "TRUE"
    enable-oslogin          = "TRUE"
  }

  lifecycle {
    # cloud-init reads its data once.
    replace_triggered_by = [terraform_data.user_data[each.key]]
  }
}
