//! gRPC services between coreward's processes: clients and servers generated from `crates/wire/proto/coreward.proto`.

use coreward_wire::WireError;
use tonic::Status;

/// Returns the status for a message that is not valid.
pub fn invalid_argument(error: WireError) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Services of version 1.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("coreward.v1");
}
