output "instance_id" {
  description = "The machine."
  value       = aws_instance.this.id
}
