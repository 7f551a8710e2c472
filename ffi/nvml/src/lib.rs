//! The calls of NVML that nvml-wrapper 0.13 lacks: fabric, remapped rows, ids of MIG instances, MPS; and what is at the
//! other end of an NVLink, where its `remote_device_type` gives `Unknown` always (it lets NVML write to a copy).
//!
//! Each asks the library that nvml-wrapper has loaded; a function that this version of it does not have is
//! [`NvmlError::FailedToLoadSymbol`], as there.

use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{
    NVML_GPU_FABRIC_STATE_COMPLETED, NVML_GPU_FABRIC_STATE_IN_PROGRESS, NVML_GPU_FABRIC_STATE_NOT_STARTED,
    NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
    nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
};
use std::mem;

/// The NVLink fabric of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricInfo {
    /// Registration.
    pub state: FabricState,
    /// NVML's code of how it ended; 0 is success.
    pub status: u32,
    /// UUID of the fabric; all zero: none.
    pub cluster: [u8; 16],
    /// Clique in it.
    pub clique: u32,
}

/// Registration with the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricState {
    /// This GPU needs no fabric manager.
    NotSupported,
    /// Not begun.
    NotStarted,
    /// A state that a newer driver knows: not to be taken for ready.
    Unknown,
    /// Under way.
    InProgress,
    /// Ended; [`FabricInfo::status`] says how.
    Completed,
}

fn state(code: u8) -> FabricState {
    match u32::from(code) {
        NVML_GPU_FABRIC_STATE_NOT_STARTED => FabricState::NotStarted,
        NVML_GPU_FABRIC_STATE_IN_PROGRESS => FabricState::InProgress,
        NVML_GPU_FABRIC_STATE_COMPLETED => FabricState::Completed,
        NVML_GPU_FABRIC_STATE_NOT_SUPPORTED => FabricState::NotSupported,
        _ => FabricState::Unknown,
    }
}

/// `nvmlDeviceGetGpuFabricInfoV`, and the older call where the library lacks that.
///
/// # Errors
/// NVML's.
pub fn fabric(nvml: &Nvml, device: &Device<'_>) -> Result<FabricInfo, NvmlError> {
    let newer = (|| {
        let call = nvml_sym(nvml.lib().nvmlDeviceGetGpuFabricInfoV.as_ref())?;
        // SAFETY: plain data of numbers, for which all bits zero are valid.
        let mut info: nvmlGpuFabricInfo_v2_t = unsafe { mem::zeroed() };
        let size = u32::try_from(size_of::<nvmlGpuFabricInfo_v2_t>()).unwrap_or(0);
        info.version = size | 2 << 24;
        // SAFETY: the handle is of this library, and the version in the struct tells NVML its layout.
        nvml_try(unsafe { call(device.handle(), (&raw mut info).cast()) })?;
        Ok(FabricInfo {
            state: state(info.state),
            status: info.status,
            cluster: info.clusterUuid,
            clique: info.cliqueId,
        })
    })();
    match newer {
        Err(
            NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound | NvmlError::InvalidArg | NvmlError::Unknown,
        ) => {
            let call = nvml_sym(nvml.lib().nvmlDeviceGetGpuFabricInfo.as_ref())?;
            // SAFETY: plain data of numbers, for which all bits zero are valid.
            let mut info: nvmlGpuFabricInfo_t = unsafe { mem::zeroed() };
            // SAFETY: the handle is of this library; the struct is the one that this call fills.
            nvml_try(unsafe { call(device.handle(), &raw mut info) })?;
            let state = state(info.state);
            Ok(FabricInfo { state, status: info.status, cluster: info.clusterUuid, clique: info.cliqueId })
        }
        other => other,
    }
}

/// Rows of memory remapped for uncorrectable errors (`nvmlDeviceGetRemappedRows`; what retired pages were before Ampere).
///
/// # Errors
/// NVML's.
pub fn remapped_rows(nvml: &Nvml, device: &Device<'_>) -> Result<u32, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    let to = (&raw mut correctable, &raw mut uncorrectable, &raw mut pending, &raw mut failed);
    // SAFETY: the handle is of this library; four numbers of ours to be written.
    nvml_try(unsafe { call(device.handle(), to.0, to.1, to.2, to.3) })?;
    Ok(uncorrectable)
}

/// GPU instance and compute instance of a MIG device.
///
/// # Errors
/// NVML's; [`NvmlError::NotSupported`] for what is no MIG device.
pub fn instance_ids(nvml: &Nvml, instance: &Device<'_>) -> Result<(u32, u32), NvmlError> {
    let gpu = nvml_sym(nvml.lib().nvmlDeviceGetGpuInstanceId.as_ref())?;
    let compute = nvml_sym(nvml.lib().nvmlDeviceGetComputeInstanceId.as_ref())?;
    let (mut gpu_id, mut compute_id) = (0, 0);
    // SAFETY: the handle is of this library; a number of ours to be written.
    nvml_try(unsafe { gpu(instance.handle(), &raw mut gpu_id) })?;
    // SAFETY: as above.
    nvml_try(unsafe { compute(instance.handle(), &raw mut compute_id) })?;
    Ok((gpu_id, compute_id))
}

/// Processes that compute through an MPS server on a device.
///
/// # Errors
/// NVML's.
pub fn mps_processes(nvml: &Nvml, device: &Device<'_>) -> Result<u32, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref())?;
    let mut count = 0;
    // SAFETY: the handle is of this library; with room for none NVML writes only how many there are.
    match nvml_try(unsafe { call(device.handle(), &raw mut count, std::ptr::null_mut()) }) {
        Ok(()) | Err(NvmlError::InsufficientSize(_)) => Ok(count),
        Err(e) => Err(e),
    }
}

/// What is at the other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// A GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// Something else, or not said.
    Unknown,
}

/// `nvmlDeviceGetNvLinkRemoteDeviceType`
///
/// # Errors
/// NVML's.
pub fn link_end(nvml: &Nvml, device: &Device<'_>, link: u32) -> Result<LinkEnd, NvmlError> {
    let call = nvml_sym(nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref())?;
    let mut kind = nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    // SAFETY: the handle is of this library; a number of ours to be written.
    nvml_try(unsafe { call(device.handle(), link, &raw mut kind) })?;
    #[allow(non_upper_case_globals, reason = "NVML's own names")]
    Ok(match kind {
        nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => LinkEnd::Gpu,
        nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => LinkEnd::Switch,
        _ => LinkEnd::Unknown,
    })
}
