resource "google_storage_bucket" "this" {
  name                        = var.name
  location                    = var.location
  force_destroy               = !var.keep
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  # Without soft delete, deleted objects are not billed for another week.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    condition {
      age = 1
    }

    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }
}

# The digest in the name makes machines install a wheel that was built again.
resource "google_storage_bucket_object" "release" {
  for_each = var.releases

  bucket = google_storage_bucket.this.name
  name   = "release/${substr(filesha256(each.value), 0, 12)}/${each.key}"
  source = each.value

  lifecycle {
    create_before_destroy = true
  }
}
