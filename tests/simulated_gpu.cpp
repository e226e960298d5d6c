// Makes a torch believe that there is one GPU with one stream, so that autograd accepts its tensors.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device gpu(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, gpu);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return gpu; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {  // torch looks for a class of this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
};

using at::RegistererCUDAHooksRegistry;
RegistererCUDAHooksRegistry hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(),
    RegistererCUDAHooksRegistry::DefaultCreator<CUDAHooks>);  // a torch with CUDA brings its own

}  // namespace

extern "C" void guard() { c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new Guard()); }
