//! What coreward's processes say to each other: the generated gRPC types, and their conversion from and to `model`.

/// Types generated from `proto/coreward.proto`; the comments there are the documentation.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("coreward.v1");
}
