output "name" {
  description = "The machine."
  value       = google_compute_instance.this.name
}
