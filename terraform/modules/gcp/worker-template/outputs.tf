output "path" {
  description = "As the controller names it: regions/<region>/instanceTemplates/<name>."
  value       = "regions/${var.region}/instanceTemplates/${google_compute_region_instance_template.this.name}"
}
