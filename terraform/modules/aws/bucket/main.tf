resource "aws_s3_bucket" "this" {
  bucket        = var.name
  force_destroy = !var.keep
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket = aws_s3_bucket.this.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

# The parts of an upload that a machine's end cut off are invisible, and billed.
resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "unfinished-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

data "aws_iam_policy_document" "encrypted_only" {
  statement {
    sid       = "EncryptedOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  count = var.encrypted_only ? 1 : 0

  bucket = aws_s3_bucket.this.id
  policy = data.aws_iam_policy_document.encrypted_only.json

  depends_on = [aws_s3_bucket_public_access_block.this]
}

# The digest in the name makes machines install a wheel that was built again.
resource "aws_s3_object" "release" {
  for_each = var.releases

  bucket      = aws_s3_bucket.this.id
  key         = "release/${substr(filesha256(each.value), 0, 12)}/${each.key}"
  source      = each.value
  source_hash = filesha256(each.value)

  lifecycle {
    create_before_destroy = true
  }
}
