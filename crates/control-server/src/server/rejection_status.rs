//! gRPC status of rejected streams.

use coreward_controller::message_rejection::MessageRejection;
use tonic::Status;

/// Returns the gRPC status of a rejection that ends a stream.
pub fn grpc_status_for_rejection(rejection: &MessageRejection) -> Status {
    let message = rejection.to_string();
    match rejection {
        MessageRejection::UnknownServer(_) => Status::not_found(message),
        MessageRejection::DuplicateAgent { .. }
        | MessageRejection::DuplicateLoadBalancer { .. }
        | MessageRejection::DuplicateRack { .. }
        | MessageRejection::SupersededAgent(_) => Status::already_exists(message),
        MessageRejection::UnknownRack(_)
        | MessageRejection::UnknownLoadBalancer(_)
        | MessageRejection::ForeignRack { .. } => Status::permission_denied(message),
        MessageRejection::TooManyRegistrations(_) | MessageRejection::TooManyLoadBalancers(_) => {
            Status::resource_exhausted(message)
        }
        _ => Status::invalid_argument(message),
    }
}
