output "url" {
  description = "Value for VCASGD_STORAGE_URL."
  value       = "s3://${aws_s3_bucket.this.id}"
}

output "arn" {
  description = "The bucket."
  value       = aws_s3_bucket.this.arn
}

output "releases" {
  description = "URL of each release, by name."
  value       = { for name, object in aws_s3_object.release : name => "s3://${object.bucket}/${object.key}" }
}
