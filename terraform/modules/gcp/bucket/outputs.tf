output "name" {
  description = "The bucket."
  value       = google_storage_bucket.this.name
}

output "url" {
  description = "Value for VCASGD_STORAGE_URL."
  value       = "gs://${google_storage_bucket.this.name}"
}

output "releases" {
  description = "URL of each release, by name."
  value       = { for name, object in google_storage_bucket_object.release : name => "gs://${object.bucket}/${object.name}" }
}
