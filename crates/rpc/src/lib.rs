//! gRPC clients and servers between coreward's processes, generated from `crates/wire/proto/coreward.proto`.

use coreward_wire::WireError;
use tonic::Status;

/// Converts the error of an invalid message into the gRPC status INVALID_ARGUMENT, with which the message is answered.
pub fn invalid_argument_status(error: WireError) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Messages and services of protocol version 1.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("coreward.v1");
}
