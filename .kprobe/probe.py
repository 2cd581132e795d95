import torch,time
from longctx_patch.kernels import *
from longctx_patch.kernels.base import *
def t(name,n,rule,dtype,H=16,G=4,D=128,score=Score(.09),docs=1):
    k=available()[name]; q,do=torch.randn(2,1,n,H,D,device="cuda",dtype=dtype); kk,v=torch.randn(2,1,n,G,D,device="cuda",dtype=dtype)
    s=Segments((n//docs,)*docs,(n//docs,)*docs,rule)
    for it in range(3):
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); m0=torch.cuda.memory_allocated(); a=time.time()
        o,l=k.forward(q,kk,v,s,score); torch.cuda.synchronize(); b=time.time()
        k.backward(do,q,kk,v,o,l,s,score); torch.cuda.synchronize(); c=time.time()
    print(name,n,rule,docs,dtype,"fwd ms %.2f bwd ms %.2f peak MiB %d"%((b-a)*1e3,(c-b)*1e3,(torch.cuda.max_memory_allocated()-m0)>>20),flush=True)
b=torch.bfloat16
for n in (32768,):
    t("cudnn",n,CAUSAL_WINDOW,b); t("torch_flash",n,CAUSAL_WINDOW,b); t("torch_flash",n,CAUSAL_WINDOW,b,docs=64); t("torch_flash",n,Window(1023,0),b); t("torch_flash",n,Window(1023,0),b,docs=8)
t("torch_eager",8192,CAUSAL_WINDOW,torch.float32); t("torch_eager",8192,Window(1023,0),b)
t("flex",32768,Window(1023,0),b); t("flex",32768,CAUSAL_WINDOW,b); t("flex",32768,CAUSAL_WINDOW,b,docs=64)
